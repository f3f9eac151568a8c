"""Ranks of a test of `test_workers.py`: a sharded checkpoint, saved and loaded by torch."""

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from qtorch import int8_weight_only, quantize_
from tests.distributed.processes import worker


def main(step: str, folder: str) -> None:
    """What is loaded is what was saved; in the step "crash" rank 1 dies after the data of some tensors."""
    torch.manual_seed(1 if step == "save" else 2)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32))
    quantize_(model, int8_weight_only())
    state = get_model_state_dict(fully_shard(model))
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        y = model(x)
        if step == "load":
            expected = torch.load(f"{folder}/output.pt", weights_only=True)
            assert not torch.equal(y, expected)
            dcp.load(state, checkpoint_id=f"{folder}/save")
            model.load_state_dict(state)
            assert torch.equal(model(x), expected)
            return
    if dist.get_rank() == 0 and step == "save":
        torch.save(y, f"{folder}/output.pt")
    if dist.get_rank() == 1 and step == "crash":
        original = torch.save

        def dies(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        torch.save = dies  # type: ignore[assignment]
    dcp.save(state, checkpoint_id=f"{folder}/{step}")


if __name__ == "__main__":
    worker(main)
