"""One rank of `test_adapters`: adapters on a frozen quantized base under DistributedDataParallel and FSDP2."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from qtorch import quantize_
from qtorch.dtypes import QuantizedTensor
from tests.distributed.processes import worker
from tests.integrations.peft.models import RECIPES, randomized

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "int8": [{}, {"find_unused_parameters": True}, {"static_graph": True}],
    "int4": [{}],
    "int8_dynamic": [{}],
    "nf4": [{}],
}


def build(seed: int, recipe: str) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32))
    quantize_(model, {"4": None, r".*": RECIPES[recipe]})
    model[0].weight.grad_scale = 2  # an attribute of the user stays
    return randomized(get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"])))


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model(x).square().mean().backward()
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(recipe: str, options: dict[str, Any]) -> None:
    rank = dist.get_rank()
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(7))
    expected = gradients(build(0, recipe), x)
    model = build(rank, recipe)  # only rank 0 has the right base
    weight = model.base_model.model[0].get_base_layer().weight
    model(x)  # kernels have seen the old codes
    replica = DistributedDataParallel(model, **options)
    assert model.base_model.model[0].get_base_layer().weight is weight
    assert isinstance(weight, QuantizedTensor)
    assert weight.grad_scale == 2
    right = build(0, recipe).base_model.model[0].weight.inner_tensors
    for key, inner in weight.inner_tensors.items():
        assert torch.equal(inner, right[key]), (recipe, rank)
    got = gradients(replica, x[rank * 10 : rank * 10 + 10])
    assert got.keys() == expected.keys()
    assert len(got) == 4
    for name, grad in got.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=f"{recipe} {name}")
        assert grad.abs().max() > 0


def check_sharded(recipe: str) -> None:
    rank = dist.get_rank()
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(7))
    expected, model = gradients(build(0, recipe), x), build(0, recipe)
    for part in (model.base_model.model[0], model.base_model.model[2], model):
        fully_shard(part)
    got = gradients(model, x[rank * 10 : rank * 10 + 10])
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        whole = grad.full_tensor()  # type: ignore[operator]
        torch.testing.assert_close(whole, expected[name], rtol=1e-4, atol=1e-6, msg=f"FSDP2 {recipe} {name}")


def check_errors() -> None:
    rank = dist.get_rank()
    model = build(0, "int8" if rank else "int4")
    with pytest.raises(ValueError, match="quantized differently"):
        DistributedDataParallel(model)
    # Without the sync at the start, no rank waits for another.
    if rank == 0:
        DistributedDataParallel(build(0, "int8"), init_sync=False)
    dist.barrier()


def main() -> None:
    for recipe, several in OPTIONS.items():
        for options in several:
            check(recipe, options)
        check_sharded(recipe)
    check_errors()


if __name__ == "__main__":
    worker(main)
