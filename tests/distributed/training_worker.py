"""One rank of `test_two_processes`: trains under DDP or FSDP2 and, beside it, the same models whole."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qtorch
from qtorch import compute_error, int8_dynamic_activation_int4_weight, quantize_, training
from qtorch.training import calibrate, convert, lsq, qat
from qtorch.training.weights.codes import WeightInCodes
from tests.distributed.processes import counted_reduces, worker

W8A8 = qtorch.int8_static_activation_int8_weight(0.03)
LEARNED: dict[str, qtorch.recipes.base.Recipe] = {
    "lsq": lsq(4, 4),
    "lsq_plus": lsq(2, 4, activation_offset=True),
    "first_batch": lsq(4, 4),
    "observed": qat(W8A8, start_step=1, freeze_step=5, observer="moving_average"),
}
RECIPES: dict[str, qtorch.recipes.base.Recipe] = {
    **LEARNED,
    "int8_mixed_precision": training.int8_mixed_precision_training(),
    "int8_weights": training.int8_weight_only_quantized_training(),
    "nf4_weights": training.weight_only_quantized_training(qtorch.nf4_weight_only(32, double_quantize=False)),
    "bitnet": training.bitnet_training(),
    "bitnet_precomputed": training.bitnet_training(),
    "qat": qat(int8_dynamic_activation_int4_weight()),
    "lora": qat(int8_dynamic_activation_int4_weight(), lora_rank=4),
}
PRODUCTS = {
    # Three a layer, but the first one's input has no gradient.
    "int8_mixed_precision": ("int_matmul", 8),
    "bitnet": ("int_matmul", 3),
    "bitnet_precomputed": ("int_matmul", 3),
    "qat": ("cpu_int8_mm", 3),
}


def prepared(recipe: qtorch.recipes.base.Recipe) -> nn.Sequential:
    """Shards of the last layer are uneven."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 33))
    quantize_(model, recipe)
    return model


def distributed(model: nn.Sequential, kind: str) -> Any:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def total(loss: Tensor) -> float:
    """The mean over both ranks."""
    both = loss.detach().clone()
    dist.all_reduce(both)
    return both.item() / 2


def train_both(kind: str, name: str) -> None:
    rank = dist.get_rank()
    batches = [torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(step)) for step in range(8)]
    model = prepared(RECIPES[name])
    if name.startswith("lsq"):
        calibrate(model, [batches[0][rank]])
    whole = copy.deepcopy(model)
    held = type(whole[0].weight)
    trained = distributed(model, kind)
    optimizers = [torch.optim.AdamW(training.parameter_groups(m, 1e-2)) for m in (trained, whole)]
    losses: list[tuple[float, float]] = []
    torch.manual_seed(rank)  # the noise of rounding does not come from the default generator
    for step, x in enumerate(batches):
        with qtorch.kernels.record_kernels() as ran, counted_reduces() as reduces:
            y = trained(x[rank])
            loss = y.square().mean()
            loss.backward()
        if kind == "fsdp" and name in PRODUCTS:
            kernel, count = PRODUCTS[name]
            assert ran.count(kernel) == count, name
            assert name != "bitnet_precomputed" or not step or not reduces, "the scales are there already"
        # Ranges are observed batch by batch: those of `whole` see both as one.
        of_both = whole(x.flatten(0, 1))
        one = of_both.square().mean()
        one.backward()
        if step == 0 and name not in LEARNED:
            assert compute_error(of_both.unflatten(0, (2, -1))[rank], y) > (40 if "bitnet" in name else 100), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((total(loss), one.item()))
        if kind == "fsdp" and name == "bitnet_precomputed":
            with counted_reduces() as reduces:
                training.precompute_scales_for_fsdp(model)
            assert len(reduces) == 1, "one all-reduce for all weights"
    assert losses[-1][0] < 0.5 * losses[0][0], (name, losses)
    assert all(abs(a - b) < 0.05 * losses[0][1] for a, b in losses), (name, losses)
    (check_replicas if kind == "ddp" else check_shards)(name, model, held)
    if name in LEARNED:
        check_that_the_state_serves(name, model, batches[0][0])


def check_replicas(name: str, model: nn.Sequential, held: type) -> None:
    """Equal, whatever each rank has drawn."""
    layer = model[0]
    weight = layer.merged() if hasattr(layer, "merged") else layer.weight
    weight = weight.dequantize() if hasattr(weight, "scheme") else weight
    replicas = [torch.empty(weight.shape) for _ in range(2)]
    dist.all_gather(replicas, weight.detach().contiguous())
    assert torch.equal(*replicas), name
    sums: list[object] = [None, None]
    dist.all_gather_object(sums, [p.double().sum().item() for p in model.parameters() if type(p) is nn.Parameter])
    assert sums[0] == sums[1], name


def check_shards(name: str, model: nn.Sequential, held: type) -> None:
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    state = [tensor for tensor in model.state_dict().values() if isinstance(tensor, DTensor) and tensor.dim() == 2]
    assert name in ("lora", *LEARNED) or all(isinstance(tensor.to_local(), held) for tensor in state)
    for refused in (nn.Sequential(fully_shard(nn.Linear(64, 64))), model):
        with pytest.raises(ValueError, match="is sharded"):
            quantize_(refused, lsq() if refused is not model else convert())
    if issubclass(held, WeightInCodes):
        # From the same seed, the same values are rounded differently by each rank.
        torch.manual_seed(0)
        shard = model[2].weight._local_tensor
        shard.copy_(torch.linspace(-1, 1, shard.numel()).reshape(shard.shape))
        codes = [torch.empty_like(shard.plain()[0]) for _ in range(2)]
        dist.all_gather(codes, shard.plain()[0])
        assert not torch.equal(*codes)
        assert (codes[0].int() - codes[1].int()).abs().max() == 1


def check_that_the_state_serves(name: str, model: nn.Sequential, x: Tensor) -> None:
    """In one process it computes the same, also when it is converted."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    y = model.eval()(x).detach()
    if dist.get_rank() == 0:
        other = prepared(RECIPES[name])
        other.load_state_dict(state)
        assert torch.equal(other.eval()(x), y), name
        assert all(parameter.count_nonzero() for parameter in other.parameters()), name
        quantize_(other, convert())
        assert torch.equal(other(x), y), name
    dist.barrier()


def check_that_a_run_goes_on() -> None:
    """Of the same seed and step, the same noise; of another step or weight, another."""
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))

    def rounded(seed: int, step: int, index: int = 0) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(64, 8), nn.Linear(64, 8))
        quantize_(model, RECIPES["int8_weights"])
        training.share_rounding(model, seed, step)
        with torch.no_grad():
            model[index].weight.copy_(values)
        return model[index].weight.detach().dequantize()

    assert torch.equal(rounded(1, 5), rounded(1, 5))
    others = [rounded(1, 6), rounded(2, 5), rounded(1, 5, index=1)]
    assert not any(torch.equal(rounded(1, 5), other) for other in others)


def main(kind: str) -> None:
    for name in RECIPES:
        # The products of kernels made of torch operators are counted.
        with qtorch.kernels.cpu.compiled_library.use(None) if name in PRODUCTS else contextlib.nullcontext():
            train_both(kind, name)
    check_that_a_run_goes_on()


if __name__ == "__main__":
    worker(main)
