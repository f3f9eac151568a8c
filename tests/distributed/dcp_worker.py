"""Ranks of `test_dcp`: sharded checkpoints of quantized models, saved and loaded by torch.distributed.checkpoint."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from qtorch import int4_weight_only, int8_weight_only, quantize_
from qtorch.training import int8_mixed_precision_training, int8_weight_only_quantized_training
from tests.distributed.processes import worker

RECIPES = {
    "int8": int8_weight_only(),
    "int4": int4_weight_only(32),
    "int8_mixed": int8_mixed_precision_training(),
    "int8_weights": int8_weight_only_quantized_training(),
}


def build(name: str, seed: int, rows: int = 96) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, rows), nn.GELU(), nn.Linear(rows, 32))
    quantize_(model, RECIPES[name])
    if dist.get_world_size() > 1:
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    return model


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.randn(4, 64, generator=torch.Generator().manual_seed(3)))


def save(folder: str) -> None:
    for name in RECIPES:
        model = build(name, seed=1)
        expected = output(model)
        dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/{name}")
        if dist.get_rank() == 0:
            torch.save(expected, f"{folder}/{name}.pt")


def load(folder: str) -> None:
    """Load into another model."""
    for name in RECIPES:
        model = build(name, seed=2)
        expected = torch.load(f"{folder}/{name}.pt", weights_only=True)
        assert not torch.equal(output(model), expected)
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        set_model_state_dict(model, state)
        torch.testing.assert_close(output(model), expected, rtol=0, atol=0, msg=name)


def crash(folder: str) -> None:
    """Rank 1 dies in a save, after the data of some tensors."""
    model = build("int8", seed=4)
    if dist.get_rank() == 1:
        original = torch.save

        def dies(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        torch.save = dies  # type: ignore[assignment]
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/crashed")


def main(step: str, *arguments: str) -> None:
    {"save": save, "load": load, "crash": crash}[step](*arguments)


if __name__ == "__main__":
    worker(main)
