"""One rank of `test_two_processes`: sharded models give what the same models give in one process."""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import qtorch
from qtorch import AffineQuantizedTensor, PerBlock, QuantSpec, int8_weight_only, nf4_weight_only, quantize_, training
from qtorch.integrations.tensor_parallel import ColwiseParallel, RowwiseParallel
from qtorch.primitives import qdtype
from qtorch.training import MasterWeight, convert
from tests import every_recipe
from tests.attack import training_recipes
from tests.distributed.processes import counted_reduces, worker
from tests.movement import across, kinds
from tests.training.small_model import muon


def build(recipe: Any, rows: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, rows), nn.Linear(rows, 64)).requires_grad_(False)
    quantize_(model, {"0": recipe})
    return model


def shard(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def check_empty_shards() -> None:
    """A weight of one row, for every recipe: the second rank has none of it."""
    for name in every_recipe.NAMES:
        model = build(every_recipe.make(name, group_size=32), 1)
        whole = copy.deepcopy(model)
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
        expected = whole(x)
        shard(model)
        assert model[0].weight._local_tensor.shape[0] == 1 - dist.get_rank(), name  # type: ignore[union-attr]
        for _ in range(2):  # the second gather fills the memory of the first
            assert torch.equal(model(x), expected), name


def check_what_is_sent() -> None:
    """The bits of codes and scales; shards of different sizes take elements of whole bytes."""
    mesh = init_device_mesh("cpu", (2,))
    for recipe, rows, bits in ((nf4_weight_only(), 64, 4.5), (nf4_weight_only(), 97, 8), (int8_weight_only(), 97, 16)):
        model = build(recipe, rows)
        shard(model)
        part: Any = model[0].weight._local_tensor  # type: ignore[union-attr]
        sent, _ = part.fsdp_pre_all_gather(mesh, torch.Size((rows, 256)), (256, 1), model[0], MixedPrecisionPolicy())
        assert 8 * sum(t.nbytes for t in sent) == bits * -(-rows // 2) * 256, (recipe, rows)


def check_other_forms() -> None:
    """Weights in blocks of several rows, which shards may not cut, and another axis."""
    torch.manual_seed(0)
    for spec, rows in (
        (QuantSpec(qdtype("int8"), PerBlock((32, 64))), 64),
        (QuantSpec(qdtype("int8"), PerBlock((64, 64))), 64),
    ):
        model = nn.Sequential(nn.Linear(128, rows)).requires_grad_(False)
        model[0].weight = nn.Parameter(AffineQuantizedTensor.from_float(model[0].weight, spec), requires_grad=False)
        x = torch.randn(4, 128)
        expected = model(x)
        assert torch.equal(shard(model)(x), expected), spec

    model = nn.Sequential(nn.Linear(64, 96)).requires_grad_(False)
    spec = QuantSpec(qdtype("int8"), PerBlock((32, 64)))
    model[0].weight = nn.Parameter(AffineQuantizedTensor.from_float(model[0].weight, spec), requires_grad=False)
    with pytest.raises(ValueError, match="cut"):  # a shard has 48 rows; on every rank
        shard(model)

    model = nn.Sequential(nn.Linear(64, 96)).requires_grad_(False)
    quantize_(model, int8_weight_only())
    with pytest.raises(NotImplementedError, match="all axes but the first"):
        fully_shard(model[0], shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))


def check_loading() -> None:
    """Numbers written into the shards after a gather are those of the next one, whatever a kernel has prepared. Each
    rank takes its part of a whole dict; one rank does not send it to others, who would receive floats."""
    options = StateDictOptions(full_state_dict=True), StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for rows in (64, 97):
        models = [build(int8_weight_only(), rows, seed=seed) for seed in (0, 0, 5)]
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
        expected, state = models[-1](x), copy.deepcopy(models[-1]).state_dict()
        model, second, other = map(shard, models)
        before = [m(x) for m in (model, model, model, second)]
        model.load_state_dict(other.state_dict())
        set_model_state_dict(second, dict(state), options=options[0])
        for m in (model, model, second):
            assert torch.equal(m(x), expected)
        assert not torch.equal(before[0], expected)
        if dist.get_rank():
            dist.broadcast_object_list([None])
        else:
            with pytest.raises(NotImplementedError, match="give every rank"):
                set_model_state_dict(second, state, options=options[1])


def check_gradients() -> None:
    """Biases beside frozen weights, and the input, get the gradients of one process."""
    rank = dist.get_rank()
    for rows in (64, 97):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, rows), nn.ReLU(), nn.Linear(rows, 64))
        quantize_(model, int8_weight_only())
        whole = copy.deepcopy(model)
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        x = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(1))
        mine = x[rank].clone().requires_grad_()
        model(mine).square().mean().backward()
        parts = [part.clone().requires_grad_() for part in x]
        (sum(whole(part).square().mean() for part in parts) / 2).backward()
        torch.testing.assert_close(mine.grad, 2 * parts[rank].grad, rtol=1e-6, atol=0)
        for i in (0, 2):
            torch.testing.assert_close(model[i].bias.grad.full_tensor(), whole[i].bias.grad, rtol=1e-5, atol=1e-8)


def check_recipes_of_training() -> None:
    """In TorchTitan's order: built on the meta device, quantized, sharded, materialized, initialized. Recipes that need
    values refuse weights without, and all refuse what is sharded, by name."""
    rank = dist.get_rank()
    needs_values = ["int4_weight_only_quantized_training", "int8_weight_only_quantized_training"]
    needs_values += ["lora_qat", "lsq", "scheduled_qat", "scheduled_training", "weight_only_quantized_training"]
    for name in training_recipes.NAMES:
        recipe = training_recipes.make(name)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
        with pytest.raises(ValueError, match=r"0: is sharded.*before fully_shard"):
            quantize_(shard(copy.deepcopy(model)), recipe)
        if name in needs_values:
            with pytest.raises(ValueError, match=rf"0: the weight is on the meta device.* for {name}\(\); load it"):
                quantize_(model, recipe)
            continue
        quantize_(model, recipe)
        shard(model).to_empty(device="cpu")
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.trunc_normal_(parameter, std=0.1)
        with pytest.raises(ValueError, match=r"0: is sharded.*full state dict"):
            quantize_(model, convert())

        whole = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
        whole.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
        quantize_(whole, recipe)
        x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1))
        y = model(x[rank])
        y.square().mean().backward()
        with torch.no_grad():
            assert qtorch.compute_error(whole(x[rank]), y) > 100, name
        (sum(whole(part).square().mean() for part in x) / 2).backward()
        for got, wanted in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-6)
        torch.optim.AdamW(model.parameters(), lr=1e-2).step()
        assert not torch.equal(model(x[rank]), y), name


BLOCKS = PerBlock((32, 32))
INT4 = training.int4_training(edge_bits=None)
# recipe: bytes that a rank sends of a weight of 128 x 64 elements, of 64 rows each, and of 97 x 64, of 49 rows
SENT = {
    training.switchback_training(): (64 * 64, 49 * 64),
    training.float8_training("tensorwise"): (64 * 64, 49 * 64),
    training.mixed_precision_training(training.fully_quantized(granularity=qtorch.PerTensor())): (64 * 64, 49 * 64),
    training.float8_training(BLOCKS): (64 * 64 + 2 * 2 * 4, None),
    training.int8_tilewise_training(): (64 * 64 + 2 * 2 * 4, None),
    training.mxfp4_training(stochastic_rounding=False, hadamard=False): (64 * 64 + 2 * 2, None),
    INT4: (64 * 64 + 64 * 4, 4 * 49 * 64),
    training.int8_mixed_precision_training(): (4 * 64 * 64, 4 * 49 * 64),
    training.float8_training("rowwise"): (4 * 64 * 64, 4 * 49 * 64),
}


def check_codes_of_masters() -> None:
    """Weights in floating point of which codes are gathered: every number is that of one process, step after step."""
    pre = MasterWeight.fsdp_pre_all_gather
    for recipe, sizes in SENT.items():
        for rows, size in zip((128, 97), sizes, strict=True):
            if size is None:
                continue
            sent: list[int] = []

            @functools.wraps(pre)
            def counted(*args: Any, sent: list[int] = sent) -> Any:
                tensors, metadata = pre(*args)
                sent.append(sum(tensor.nbytes for tensor in tensors))
                return tensors, metadata

            torch.manual_seed(0)
            whole = nn.Sequential(nn.Linear(64, rows), nn.GELU(), nn.Linear(rows, 64))
            quantize_(whole, {"0": recipe})
            model = shard(copy.deepcopy(whole))
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, whole)]
            for step in range(3):
                x = torch.randn(300, 64, generator=torch.Generator().manual_seed(step))
                leaves = x.clone().requires_grad_(), x.clone().requires_grad_()
                MasterWeight.fsdp_pre_all_gather = counted  # type: ignore[assignment, method-assign]
                y = model(leaves[0])
                y.square().mean().backward()
                MasterWeight.fsdp_pre_all_gather = pre  # type: ignore[method-assign]
                wanted = whole(leaves[1])
                wanted.square().mean().backward()
                assert torch.equal(y, wanted), (recipe, rows, step)
                assert torch.equal(leaves[0].grad, leaves[1].grad), (recipe, rows, step)
                for got, one in zip(model.parameters(), whole.parameters(), strict=True):
                    assert torch.equal(got.grad.full_tensor(), one.grad), (recipe, rows, step)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    assert torch.equal(model(x), whole(x)), (recipe, rows, step)
            assert set(sent) == {size}, (recipe, rows, sent)
            assert len(sent) == 6


AT_ONCE = {
    "0": training.switchback_training(),
    "2": training.float8_training("tensorwise"),
    "4": training.bitnet_training(),
    "6": training.mixed_precision_training(training.fully_quantized(granularity=qtorch.PerTensor())),
}


def check_scales_at_once() -> None:
    """Scales of whole tensors computed ahead are those of each gather; they are not used once a weight has changed."""
    for rows in (128, 97, 1):  # shards that are even, uneven, empty
        torch.manual_seed(0)
        widths = [64, rows, 64, rows, 64]
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        model = nn.Sequential(*[module for layer in layers for module in (layer, nn.GELU())])
        quantize_(model, AT_ONCE)
        models = [shard(copy.deepcopy(model)) for _ in range(2)]
        ahead, wanted = models
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in models]
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    for m in models:
                        m[0].weight.mul_(3)
            x = torch.randn(300, 64, generator=torch.Generator().manual_seed(step))
            outputs, counts = [], []
            for m, optimizer in zip(models, optimizers, strict=True):
                with counted_reduces() as reduces:
                    outputs.append(m(x))
                    outputs[-1].square().mean().backward()
                counts.append(len(reduces))
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*outputs), (rows, step)
            assert counts == [8 if step == 0 else 2 if step == 2 else 0, 8], (rows, step)
            with counted_reduces() as reduces:
                training.precompute_scales_for_fsdp(ahead)
            assert len(reduces) == 2, "ranges, and the mean of BitNet"
        both = zip(ahead.parameters(), wanted.parameters(), strict=True)
        assert all(torch.equal(one.full_tensor(), other.full_tensor()) for one, other in both)


def check_muon() -> None:
    """The update of a shard is a part of that of the whole matrix, also where shards are uneven."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(64, 97), nn.GELU(), nn.Linear(97, 80))
    models = shard(copy.deepcopy(whole)), whole
    optimizers = [muon(model.parameters(), lr=1e-2) for model in models]
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(models[0].parameters(), whole.parameters(), strict=True))


CHECKS = [
    check_muon, check_codes_of_masters, check_scales_at_once, check_recipes_of_training, check_empty_shards,
    check_what_is_sent, check_other_forms, check_loading, check_gradients,
]  # fmt: skip


OF_A_MESH = ("int8_weight_only", "nf4_weight_only", "int8, a convolution", "int8_mixed_precision_training")
OF_A_MESH += ("bitnet_training", "int8_weight_only_quantized_training", "qat")


def check_with_tensor_parallelism(mesh: Any) -> None:
    """Scales of whole weights and gradients are those of one process; a process may learn ranges alone."""
    for name in ("bitnet_training", "int8_mixed_precision_training", "int8_tilewise_training"):
        model, x = build(training_recipes.make(name), 128).requires_grad_(), torch.randn(64, 256)
        dist.broadcast(x, 0)
        (wanted := model(x)).square().mean().backward()
        gradient = model[0].weight.grad
        model.zero_grad()
        parallelize_module(model, mesh["shards"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        for part in (*model, model):
            fully_shard(part, mesh=mesh["replicas"])
        (y := model(x)).square().mean().backward()
        torch.testing.assert_close(y, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
        got = model[0].weight.grad.full_tensor()
        torch.testing.assert_close(got, gradient, rtol=0, atol=1e-3 * float(gradient.abs().max()))
    training.average_ranges_over([dist.new_group([rank]) for rank in range(4)][dist.get_rank()])
    if dist.get_rank() == 0:  # a stage of a pipeline
        build(training.lsq(4, 8), 128)(x)
    training.average_ranges_over(None)


def main() -> None:
    if dist.get_world_size() == 2:
        for check in CHECKS:
            check()
        return
    # Two replicas of two shards.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    check_with_tensor_parallelism(mesh)
    for kind in map(kinds.BY_NAME.__getitem__, OF_A_MESH):
        for rows in kind.rows:
            across.sharded_like_whole(kind, rows, mesh)


if __name__ == "__main__":
    worker(main)
