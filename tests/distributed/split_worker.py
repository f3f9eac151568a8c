"""One rank of `test_two_processes`: layers that train or serve, cut over two ranks, against one process."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, parallel
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import qtorch
from qtorch import PerBlock, PerTensor, int4_weight_only, int8_dynamic_activation_int8_weight, quantize_, training
from qtorch.integrations.tensor_parallel import ColwiseParallel, RowwiseParallel
from qtorch.primitives import PercentileRule, qdtype
from qtorch.recipes.sparse import BlockSparse
from qtorch.training import GemmSpec, TrainingSpec, int8_mixed_precision_training, mixed_precision_training, qat
from qtorch.training.engine.numerics import int8
from tests.attack import training_recipes
from tests.distributed.processes import worker

STEPS = 4


CASES: dict[str, Any] = {
    "int8": int8_mixed_precision_training(),
    "int8 per tensor": mixed_precision_training(training.fully_quantized(granularity=PerTensor())),
    "int8, scales folded": mixed_precision_training(
        TrainingSpec(GemmSpec(int8(PerBlock((-1, 1))), int8(), fold="lhs"))
    ),
    "int8 in groups": mixed_precision_training(training.fully_quantized(granularity=PerBlock((1, 32)))),
    "switchback": training.switchback_training(),
    "jetfire": training.int8_tilewise_training(),
    "int4": training.int4_training(edge_bits=None),
    "binary": training.binary_training(edge_bits=None),
    "bitnet": training.bitnet_training(),
    "float8 rowwise": training.float8_training(),
    "float8 tensorwise": training.float8_training(PerTensor()),
    "float8 blocks": training.float8_training(PerBlock((32, 32))),
    "mxfp8": training.mxfp8_training(),
    "mxfp4": training.mxfp4_training(stochastic_rounding=False, hadamard=False),
    "qat int8": qat(int8_dynamic_activation_int8_weight()),
    "qat int8 int4": qat(qtorch.int8_dynamic_activation_int4_weight(group_size=32)),
    "qat int4": qat(int4_weight_only(group_size=32)),
    "qat in fp32": qat(int8_dynamic_activation_int8_weight(), compute_dtype=torch.float32),
}
EXACT = ("int8", "int8 per tensor")
"""All sums are those of integers: every number is that of one process. Otherwise sums of floats have another order, and
numbers are compared after a step from equal weights: the last bit of a weight may become a code in the next step."""


def build(recipe: Any, rows: int = 128) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, rows), nn.GELU(), nn.Linear(rows, 64))
    quantize_(model, recipe)
    return model


def inputs(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + step))


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.detach() - expected).norm() / expected.norm()).item()


def floats(tensor: Any) -> Tensor:
    """A parameter, or a gradient, whole and as floats."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.floats() if isinstance(tensor, training.MasterWeight) else tensor


def check_training(mesh: Any, name: str) -> None:
    """Outputs, gradients and, after each step, weights are those of one process."""
    model, exact = build(CASES[name]), name in EXACT
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    kind = torch.optim.AdamW if exact else torch.optim.SGD
    optimizers = [kind(m.parameters(), lr=1e-2) for m in (model, alone)]

    def compare(what: str, got: Tensor, expected: Tensor) -> None:
        error = relative(got, expected.detach())
        assert error == 0 if exact else error < 1e-6, (name, what, step, error)

    for step in range(STEPS):
        x = inputs(step, 2, 16, 64)
        x[0, 3] *= 20  # a token far from the others
        xs = [x.clone().requires_grad_() for _ in range(2)]
        ys = [m(x) for m, x in zip((model, alone), xs, strict=True)]
        for y in ys:
            (y - inputs(50 + step, *y.shape)).square().mean().backward()
        compare("output", ys[0], ys[1])
        compare("gradient of the input", xs[0].grad, xs[1].grad)  # type: ignore[arg-type]
        pairs = [(key, p, q) for (key, p), q in zip(model.named_parameters(), alone.parameters(), strict=True)]
        for key, p, q in pairs:
            compare(f"gradient of {key}", floats(p.grad), q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for key, p, q in pairs:
            compare(key, floats(p), floats(q))
            if not exact:
                with torch.no_grad():
                    q.copy_(floats(p))


def check_free_runs(mesh: Any) -> None:
    """Where sums of floats differ in their order, losses stay together."""
    for name in ("bitnet", "float8 tensorwise", "qat int8"):
        model = build(CASES[name])
        alone = copy.deepcopy(model)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        losses: list[list[float]] = [[], []]
        for m, row in zip((model, alone), losses, strict=True):
            optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
            for step in range(12):
                x = inputs(step, 32, 64)
                loss = (m(x) - x.flip(1)).square().mean()
                row.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
        assert losses[0] == pytest.approx(losses[1], rel=5e-3), (name, losses)
        assert losses[0][-1] < 0.8 * losses[0][0], (name, losses)


class Block(nn.Module):
    """A norm, and a layer into more features and back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def check_sequence_parallel(mesh: Any) -> None:
    """Between the layers that are cut each rank has a part of the tokens, and norms run on these."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    rank = dist.get_rank()
    for recipe in (
        int8_mixed_precision_training(), training.bitnet_training(), qat(int8_dynamic_activation_int8_weight()),
        int8_dynamic_activation_int8_weight(), int4_weight_only(32),
    ):  # fmt: skip
        torch.manual_seed(0)
        model = Block()
        if not recipe.trains:
            for layer in (model.up, model.down):
                layer.weight.requires_grad_(False)
        quantize_(model, recipe)
        alone = copy.deepcopy(model)
        parallelize_module(model, mesh, plan)
        x = inputs(0, 2, 16, 64)
        mine, whole = x.chunk(2, 1)[rank].clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = model(mine), alone(whole)
        assert y.shape == (2, 8, 64)
        assert relative(y, expected.chunk(2, 1)[rank].detach()) < 1e-6, recipe
        y.square().sum().backward()
        expected.square().sum().backward()
        assert relative(mine.grad, whole.grad.chunk(2, 1)[rank]) < 1e-6, recipe  # type: ignore
        for (key, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            if q.requires_grad:
                assert relative(floats(p.grad), q.grad) < 2e-6, (recipe, key)  # type: ignore[arg-type]


def check_other_inputs(mesh: Any) -> None:
    """Sizes that two ranks don't divide; fewer axes; autocast; no gradient; a token that is not finite."""
    model = build(int8_mixed_precision_training(), rows=97)
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for x in (inputs(0, 64), inputs(0, 5, 64), inputs(0, 2, 3, 64)):
        with torch.no_grad():
            assert torch.equal(model(x), alone(x))
        with torch.autocast("cpu", torch.bfloat16):
            ys = [m(x) for m in (model, alone)]
        assert ys[0].dtype == torch.bfloat16
        assert torch.equal(*ys)
        for y in ys:
            y.float().square().sum().backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(floats(p.grad), q.grad)
        model.zero_grad()
        alone.zero_grad()

    for recipe in (
        int8_mixed_precision_training(),
        training.float8_training(PerTensor()),
        qat(qtorch.int8_weight_only()),
    ):
        model = build(recipe)
        alone = copy.deepcopy(model)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for lost in (torch.nan, torch.inf):
            x = inputs(0, 4, 64)
            x[1, 5] = lost
            y, expected = model(x), alone(x)
            assert not y[1].isfinite().any()
            assert relative(y[[0, 2, 3]], expected[[0, 2, 3]].detach()) < 1e-6
        hidden = inputs(0, 4, 128)
        hidden[1] *= 50  # no part of a scale that tokens share
        hidden[1, 5] = torch.nan  # a feature of the first rank
        y, expected = model[2](hidden.chunk(2, 1)[dist.get_rank()]), alone[2](hidden)
        assert y[1].isnan().all()
        assert relative(y[[0, 2, 3]], expected[[0, 2, 3]].detach()) < 1e-6

    with pytest.raises(ValueError, match="expected an input of dtype"):
        model(inputs(0, 4, 64).double())


def check_whole_again(mesh: Any) -> None:
    """The state of a model that is cut loads into one that is not, which converts."""
    for recipe in (int8_mixed_precision_training(), training.bitnet_training(), qat(int4_weight_only(group_size=32))):
        model = build(recipe)
        alone = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.zero_()
        expected = copy.deepcopy(model)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        alone.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
        for m in (alone, expected):
            quantize_(m, training.convert())
        assert torch.equal(alone(inputs(0, 4, 64)), expected(inputs(0, 4, 64)))


def check_refused(mesh: Any) -> None:
    """By an error on every rank, before anything is sent."""
    scaled = TrainingSpec(GemmSpec(int8(), int8()), scale_gradient=True)
    balanced = TrainingSpec(GemmSpec(int8(), int8(), mid_alpha=(0.5, 0.5)))
    percentile = qtorch.QuantSpec(qdtype("int8"), scale_rule=PercentileRule(), quant_min=-127)
    for recipe, rows, match in (
        (training.int8_weight_only_quantized_training(), 128, "chooses codes and scales anew from whole rows"),
        (mixed_precision_training(scaled), 128, "scale_gradient needs the elements"),
        (mixed_precision_training(balanced), 128, "leave mid_alpha out"),
        (mixed_precision_training(TrainingSpec(GemmSpec(percentile, percentile))), 128, "ranges by PercentileRule"),
        (training.int8_tilewise_training(), 96, "blocks of 32 do not divide the 48 elements"),
        (training.mxfp8_training(), 96, "blocks of 32 do not divide the 48 elements"),
        (training.nvfp4_training(), 128, "has scales that are quantized themselves"),
        (mixed_precision_training(TrainingSpec(GemmSpec(int8(), int8(), hadamard=16))), 128, "leave hadamard out"),
        (mixed_precision_training(training.fully_quantized()), 1, "leaves one of 2 ranks without"),
        (qat(qtorch.nf4_weight_only()), 128, "has look-up tables"),
        (qat(BlockSparse(qtorch.int8_weight_only(), block_size=32, sparsity=0.5)), 128, "prunes the weight"),
    ):
        model = build(recipe, rows)
        with pytest.raises(ValueError, match=f"(?s)RowwiseParallel: Linear.*{match}"):
            parallelize_module(model, mesh, {"2": RowwiseParallel()})
    spec = TrainingSpec(GemmSpec(int8(), int8()))
    for recipe in (
        training.scheduled_training(spec, training.QuantizationSchedule(start_step=2)),
        training.lsq(weight_bits=4, activation_bits=8),
        training.lora_qat(int4_weight_only(group_size=32), rank=4),
    ):
        model = build(recipe)
        with pytest.raises(ValueError, match=r"(?s)ColwiseParallel: .*a schedule of its own"):
            parallelize_module(model, mesh, {"0": ColwiseParallel()})
    table = nn.Embedding(64, 32)
    table.weight = nn.Parameter(training.MasterWeight.of(table.weight.detach(), spec))
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(ValueError, match="an embedding in training"):
            parallelize_module(table, mesh, style)


# --- frozen weights ---
def frozen(recipe: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 64)).requires_grad_(False)
    quantize_(model, recipe)
    return model


def check_uneven(mesh: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 97).requires_grad_(False)
    quantize_(layer, qtorch.int8_weight_only())
    expected = layer.weight.dequantize()
    sharded = distribute_tensor(layer.weight, mesh, [Shard(0)])
    assert sharded.to_local().shape[0] == (49, 48)[dist.get_rank()]
    assert torch.equal(sharded.full_tensor().dequantize(), expected)


def check_scales_of_whole_rows(mesh: Any) -> None:
    """The codes of an input on two ranks are those in one process, and kernels of integers run on them.

    With torch's style each rank chooses scales of its part, which is 1e-3 or more from one process.
    """
    for recipe, kernel in (
        (qtorch.int8_dynamic_activation_int8_weight(), "int8_mm"),
        (qtorch.float8_dynamic_activation_float8_weight(PerTensor()), "scaled_mm"),
        (qtorch.int8_dynamic_activation_int4_weight(group_size=32), "weight_only_mm"),  # with zero points
    ):
        models = [frozen(recipe) for _ in range(3)]
        styles = (RowwiseParallel(), parallel.RowwiseParallel())
        x = 3 * torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(1))
        expected = models[2](x)
        for model, style in zip(models, styles, strict=False):
            parallelize_module(model, mesh, {"0": parallel.ColwiseParallel(), "2": style})
        hidden = models[0][1](models[0][0](x))
        with qtorch.kernels.record_kernels() as ran:
            y = models[0][2](hidden)
        assert any(kernel in name for name in ran), ran
        assert y.shape == expected.shape
        assert relative(y, expected) < 1e-6
        assert relative(models[1](x), expected) > 1e-4
    # Along the tokens, as sequence parallelism wants it.
    model, whole = frozen(recipe), frozen(recipe)
    style = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, {"0": parallel.ColwiseParallel(), "2": style})
    x = torch.randn(2, 6, 256, generator=torch.Generator().manual_seed(1))
    assert relative(model(x), whole(x).chunk(2, 1)[dist.get_rank()]) < 1e-6


def check_styles_of_torch_are_refused(mesh: Any) -> None:
    """For every weight in training, at once, with the styles that know it."""
    for name in training_recipes.NAMES:
        for style in (parallel.ColwiseParallel(), parallel.RowwiseParallel()):
            layer = nn.Linear(64, 64)
            quantize_(layer, training_recipes.make(name))
            weight, words = layer.weight, r"parallelized|RowwiseParallel of qtorch\.integrations"
            with pytest.raises((ValueError, NotImplementedError), match=words):
                parallelize_module(nn.Sequential(layer), mesh, {"0": style})
            assert layer.weight is weight


CHECKS = [check_free_runs, check_sequence_parallel, check_other_inputs, check_whole_again, check_refused]
CHECKS += [check_uneven, check_scales_of_whole_rows, check_styles_of_torch_are_refused]


def main() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name in CASES:
        check_training(mesh, name)
    for check in CHECKS:
        check(mesh)


if __name__ == "__main__":
    worker(main)
