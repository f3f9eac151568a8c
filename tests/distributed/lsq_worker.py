"""One rank of `test_two_processes`: trains learned steps under DDP or FSDP2 and, beside it, the same model whole."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from qtorch import int8_static_activation_int8_weight, quantize_
from qtorch.recipes.base import Recipe
from qtorch.training import calibrate, convert, lsq, parameter_groups, qat
from tests.distributed.processes import worker

RECIPES = {
    "lsq": lsq(4, 4),
    "lsq_plus": lsq(2, 4, activation_offset=True),
    "first_batch": lsq(4, 4),
    "qat": qat(int8_static_activation_int8_weight(0.03), start_step=1, freeze_step=5, observer="moving_average"),
}


def prepared(recipe: Recipe) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 32))
    quantize_(model, recipe)
    return model


def main(kind: str, name: str) -> None:
    rank = dist.get_rank()
    batches = [torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(step)) for step in range(8)]
    model = prepared(RECIPES[name])
    if name != "first_batch":
        calibrate(model, [batches[0][rank]])
    whole = copy.deepcopy(model)
    trained: nn.Module = model
    if kind == "ddp":
        trained = nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        sharded = nn.Sequential(nn.Linear(64, 64))
        fully_shard(sharded)
        for refused, recipe in ((sharded, lsq()), (model, convert())):
            with pytest.raises(ValueError, match="is sharded"):
                quantize_(refused, recipe)
    optimizers = [torch.optim.Adam(parameter_groups(m, 1e-3, scale_lr=1e-2)) for m in (trained, whole)]
    losses: list[tuple[float, float]] = []
    for x in batches:
        loss = (trained(x[rank]) - 1).square().mean()
        loss.backward()
        # Ranges are observed batch by batch: those of `whole` see both as one.
        one = (whole(x.flatten(0, 1)) - 1).square().mean()
        one.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append((total.item() / 2, one.item()))
    assert losses[-1][1] < 0.93 * losses[0][1], losses
    assert all(abs(a - b) < 0.05 * b for a, b in losses), losses

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        other = prepared(RECIPES[name])
        other.load_state_dict(state)
    shared = [list(state), [tensor.double().sum().item() for tensor in state.values()]]
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, shared if kind == "ddp" else None)
    assert gathered[0] == gathered[1], "replicas differ"
    x = batches[0][0]
    model.eval()
    y = model(x).detach()
    if rank == 0:
        assert torch.equal(other.eval()(x), y)
        assert all(parameter.count_nonzero() for parameter in other.parameters())
        quantize_(other, convert())
        assert torch.equal(other(x), y)
    dist.barrier()


if __name__ == "__main__":
    worker(main)
