"""One rank of `test_two_processes`: trains a sharded model and, beside it, the same model in one piece."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from qtorch import compute_error, int8_dynamic_activation_int4_weight, quantize_
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.training import (
    CodesWeight,
    MasterWeight,
    bitnet_training,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
    precompute_bitnet_scale_for_fsdp,
    qat,
)
from tests.distributed.processes import worker

RECIPES = {
    "int8_mixed_precision": int8_mixed_precision_training(),
    "int8_weights": int8_weight_only_quantized_training(),
    "bitnet": bitnet_training(),
    "bitnet_precomputed": bitnet_training(),
    "qat": qat(int8_dynamic_activation_int4_weight()),
}

PRODUCTS = {
    # Three a layer, but the first one's input has no gradient.
    "int8_mixed_precision": ("int_matmul", 8),
    "bitnet": ("int_matmul", 3),
    "bitnet_precomputed": ("int_matmul", 3),
    "qat": ("cpu_int8_mm", 3),
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 32))
    return model


def main(name: str) -> None:
    rank = dist.get_rank()
    model = make()
    quantize_(model, RECIPES[name])
    whole = copy.deepcopy(model)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    kind = CodesWeight if name == "int8_weights" else MasterWeight
    assert all(isinstance(p.to_local(), kind) for p in model.parameters() if p.dim() == 2)

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, whole)]
    reduces = 0
    all_reduce = dist.all_reduce

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal reduces
        reduces += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    losses: list[tuple[float, float]] = []
    for step in range(6):
        x = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(step))
        before = reduces
        with record_kernels() as ran:
            y = model(x[rank])
            loss = y.square().mean()
            loss.backward()
        if name == "bitnet_precomputed" and step:
            assert reduces == before, "the scales are there already"
        if name in PRODUCTS:
            kernel, count = PRODUCTS[name]
            assert ran.count(kernel) == count
        halves = [whole(part).square().mean() for part in x]
        (sum(halves) / 2).backward()
        if step == 0:
            assert compute_error(whole(x[rank]), y) > (40 if name.startswith("bitnet") else 100)
        total = torch.tensor(loss.item())
        all_reduce(total)
        losses.append((total.item() / 2, sum(half.item() for half in halves) / 2))
        torch.manual_seed(step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if name == "bitnet_precomputed":
            before = reduces
            precompute_bitnet_scale_for_fsdp(model)
            assert reduces == before + 1, "one all-reduce for all weights"
    dist.all_reduce = all_reduce
    assert losses[-1][0] < 0.5 * losses[0][0], losses
    assert all(abs(a - b) < 0.05 * losses[0][1] for a, b in losses), losses

    if name == "int8_weights":
        # From the same seed, the same values are rounded differently by each rank.
        torch.manual_seed(0)
        shard = model[0].weight._local_tensor
        shard.copy_(torch.linspace(-1, 1, shard.numel()).reshape(shard.shape))
        codes = [torch.empty_like(shard.plain()[0]) for _ in range(2)]
        dist.all_gather(codes, shard.plain()[0])
        assert not torch.equal(*codes)
        assert (codes[0].int() - codes[1].int()).abs().max() == 1
    state = model.state_dict()
    assert all(isinstance(v.to_local(), kind) for v in state.values() if v.dim() == 2)


if __name__ == "__main__":
    with compiled_library.use(None):  # the products of kernels made of torch operators are counted
        worker(main)
