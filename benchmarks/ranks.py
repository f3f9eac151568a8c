"""The processes of a run: one, or those that torchrun starts, with a model that FSDP2 shards over them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """This process among the others.

    Args:
        rank, count: its number, and how many there are.
        sharded: whether torchrun has started them.
    """

    rank: int = 0
    count: int = 1
    sharded: bool = False

    @classmethod
    @contextlib.contextmanager
    def of_this_run(cls, device: str) -> Iterator[Ranks]:
        """All processes of this run; gloo on CPUs, NCCL on GPUs, of which each process has one."""
        if not dist.is_torchelastic_launched():
            yield cls()
            return
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(minutes=10))
        try:
            yield cls(dist.get_rank(), dist.get_world_size(), True)
        finally:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part(self, rows: Tensor) -> Tensor:
        """The rows of this process; the number of processes divides them."""
        return rows.chunk(self.count)[self.rank]

    def mean(self, value: float) -> float:
        """The mean over all processes."""
        if self.count == 1:
            return value
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return total.item() / self.count

    def shard(self, model: nn.Module, layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
        """Shard each layer, and the rest of the model, by FSDP2.

        Args:
            dtype: in which floats are gathered and gradients are sent.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(None if dtype == torch.float32 else dtype)
        for layer in layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)

    def save(self, folder: Path, model: nn.Module, optimizer: Any, rest: dict[str, Any]) -> None:
        """Each process writes its shards, and the first one `rest`, by torch.distributed.checkpoint."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
        if self.is_first:
            torch.save(rest, folder / "rest.pt")

    def load(self, folder: Path, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        """Load what any number of processes has saved.

        Returns:
            `rest` of `save`.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        return torch.load(folder / "rest.pt", weights_only=True)
