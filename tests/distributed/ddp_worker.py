"""One rank of `test_two_processes`: replicas, seeded alike, stay equal."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from qtorch import int8_dynamic_activation_int4_weight, quantize_
from qtorch.training import (
    bitnet_training,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
    qat,
    share_rounding,
)
from tests.distributed.processes import worker

RECIPES = (
    int8_mixed_precision_training(),
    bitnet_training(),
    int8_weight_only_quantized_training(),
    qat(int8_dynamic_activation_int4_weight()),
    qat(int8_dynamic_activation_int4_weight(), lora_rank=4),
)


def values_of(layer: nn.Linear) -> torch.Tensor:
    """The weight, with what has been learned beside it."""
    weight = layer.merged() if hasattr(layer, "merged") else layer.weight.dequantize()
    return weight.detach().clone().contiguous()


def check_that_a_run_goes_on() -> None:
    """Of the same seed and step, the same noise; of another step or weight, another."""
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))

    def rounded(seed: int, step: int, index: int = 0) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(64, 8), nn.Linear(64, 8))
        quantize_(model, int8_weight_only_quantized_training())
        share_rounding(model, seed, step)
        with torch.no_grad():
            model[index].weight.copy_(values)
        return model[index].weight.detach().dequantize()

    assert torch.equal(rounded(1, 5), rounded(1, 5))
    others = [rounded(1, 6), rounded(2, 5), rounded(1, 5, index=1)]
    assert not any(torch.equal(rounded(1, 5), other) for other in others)


def main() -> None:
    rank = dist.get_rank()
    for recipe in RECIPES:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
        quantize_(model, recipe)
        ddp = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        before = values_of(model[0])
        torch.manual_seed(rank)  # the noise of rounding does not come from the default generator
        for step in range(3):
            x = torch.randn(300, 64, generator=torch.Generator().manual_seed(2 * step + rank))
            ddp(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weight = values_of(model[0])
        replicas = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(replicas, weight)
        assert torch.equal(*replicas), recipe
        assert not torch.equal(weight, before), recipe
    check_that_a_run_goes_on()


if __name__ == "__main__":
    worker(main)
