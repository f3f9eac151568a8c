"""One rank of `test_two_processes`: layers in training, cut over two ranks, against the same model in one process."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from qtorch import (
    PerBlock,
    PerTensor,
    QuantSpec,
    int4_weight_only,
    int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    nf4_weight_only,
    quantize_,
)
from qtorch.integrations.tensor_parallel import ColwiseParallel, RowwiseParallel
from qtorch.primitives import PercentileRule, qdtype
from qtorch.recipes.sparse import BlockSparse
from qtorch.training import (
    GemmSpec,
    MasterWeight,
    QuantizationSchedule,
    TrainingSpec,
    binary_training,
    bitnet_training,
    convert,
    float8_training,
    fully_quantized,
    int4_training,
    int8_mixed_precision_training,
    int8_tilewise_training,
    int8_weight_only_quantized_training,
    lora_qat,
    lsq,
    mixed_precision_training,
    mxfp8_training,
    qat,
    scheduled_training,
    switchback_training,
)
from qtorch.training.engine.numerics import int8
from tests.distributed.processes import worker

STEPS = 4


class Case(NamedTuple):
    """`exact`: all sums are those of integers, so that every number is that of one process. Otherwise sums of floats
    have another order, and numbers are compared after a step from equal weights: a difference in the last bit of a
    weight may become one of a code in the next step."""

    recipe: Any
    exact: bool = False


CASES = {
    "int8": Case(int8_mixed_precision_training(), exact=True),
    "int8 per tensor": Case(mixed_precision_training(fully_quantized(granularity=PerTensor())), exact=True),
    "int8, scales folded": Case(
        mixed_precision_training(TrainingSpec(GemmSpec(int8(PerBlock((-1, 1))), int8(), fold="lhs"))),
    ),
    "int8 in groups": Case(mixed_precision_training(fully_quantized(granularity=PerBlock((1, 32))))),
    "switchback": Case(switchback_training()),
    "jetfire": Case(int8_tilewise_training()),
    "int4": Case(int4_training(edge_bits=None)),
    "binary": Case(binary_training(edge_bits=None)),
    "bitnet": Case(bitnet_training()),
    "float8 rowwise": Case(float8_training()),
    "float8 tensorwise": Case(float8_training(PerTensor())),
    "mxfp8": Case(mxfp8_training()),
    "qat int8": Case(qat(int8_dynamic_activation_int8_weight())),
    "qat int8 int4": Case(qat(int8_dynamic_activation_int4_weight(group_size=32))),
    "qat int4": Case(qat(int4_weight_only(group_size=32))),
    "qat in fp32": Case(qat(int8_dynamic_activation_int8_weight(), compute_dtype=torch.float32)),
}


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
    return tensor.floats() if isinstance(tensor, MasterWeight) else tensor


def check_training(mesh: Any, name: str, case: Case) -> None:
    """Outputs, gradients and, after each step, weights are those of one process."""
    model = build(case.recipe)
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    kind = torch.optim.AdamW if case.exact else torch.optim.SGD
    optimizers = [kind(m.parameters(), lr=1e-2) for m in (model, alone)]

    def compare(what: str, got: Tensor, expected: Tensor) -> None:
        error = relative(got, expected.detach())
        assert error == 0 if case.exact else error < 1e-6, (name, what, step, error)

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
            if not case.exact:
                with torch.no_grad():
                    q.copy_(floats(p))


def check_free_runs(mesh: Any) -> None:
    """Where sums of floats differ in their order, losses stay together."""
    for name in ("bitnet", "float8 tensorwise", "qat int8"):
        model = build(CASES[name].recipe)
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
        int8_mixed_precision_training(),
        bitnet_training(),
        qat(int8_dynamic_activation_int8_weight()),
        int8_dynamic_activation_int8_weight(),
        int4_weight_only(32),
    ):
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

    for recipe in (int8_mixed_precision_training(), float8_training(PerTensor()), qat(int8_weight_only())):
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
    for recipe in (int8_mixed_precision_training(), bitnet_training(), qat(int4_weight_only(group_size=32))):
        model = build(recipe)
        alone = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.zero_()
        expected = copy.deepcopy(model)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        alone.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
        for m in (alone, expected):
            quantize_(m, convert())
        assert torch.equal(alone(inputs(0, 4, 64)), expected(inputs(0, 4, 64)))


def check_refused(mesh: Any) -> None:
    """By an error on every rank, before anything is sent."""
    scaled = TrainingSpec(GemmSpec(int8(), int8()), scale_gradient=True)
    balanced = TrainingSpec(GemmSpec(int8(), int8(), mid_alpha=(0.5, 0.5)))
    percentile = QuantSpec(qdtype("int8"), scale_rule=PercentileRule(), quant_min=-127)
    for recipe, rows, match in (
        (int8_weight_only_quantized_training(), 128, "chooses codes and scales anew from whole rows"),
        (mixed_precision_training(scaled), 128, "scale_gradient needs the elements"),
        (mixed_precision_training(balanced), 128, "leave mid_alpha out"),
        (mixed_precision_training(TrainingSpec(GemmSpec(percentile, percentile))), 128, "ranges by PercentileRule"),
        (int8_tilewise_training(), 96, "blocks of 32 do not divide the 48 elements"),
        (mxfp8_training(), 96, "blocks of 32 do not divide the 48 elements"),
        (mixed_precision_training(fully_quantized()), 1, "leaves one of 2 ranks without"),
        (qat(nf4_weight_only()), 128, "has look-up tables"),
        (qat(BlockSparse(int8_weight_only(), block_size=32, sparsity=0.5)), 128, "prunes the weight"),
    ):
        model = build(recipe, rows)
        with pytest.raises(ValueError, match=f"(?s)RowwiseParallel: Linear.*{match}"):
            parallelize_module(model, mesh, {"2": RowwiseParallel()})
    spec = TrainingSpec(GemmSpec(int8(), int8()))
    for recipe in (
        scheduled_training(spec, QuantizationSchedule(start_step=2)),
        lsq(weight_bits=4, activation_bits=8),
        lora_qat(int4_weight_only(group_size=32), rank=4),
    ):
        model = build(recipe)
        with pytest.raises(ValueError, match=r"(?s)ColwiseParallel: .*a schedule of its own"):
            parallelize_module(model, mesh, {"0": ColwiseParallel()})
    table = nn.Embedding(64, 32)
    table.weight = nn.Parameter(MasterWeight.of(table.weight.detach(), spec))
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(ValueError, match="an embedding in training"):
            parallelize_module(table, mesh, style)


def main() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, case in CASES.items():
        check_training(mesh, name, case)
    for check in (check_free_runs, check_sequence_parallel, check_other_inputs, check_whole_again, check_refused):
        check(mesh)


if __name__ == "__main__":
    worker(main)
