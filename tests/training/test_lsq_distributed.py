"""Learned and observed scales in two gloo processes: they train as one process does, and convert from a full state."""

from __future__ import annotations

import pytest
import torch

from tests.training.test_distributed import run


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["lsq", "lsq_plus", "first_batch", "qat"])
def test_two_processes(kind: str, name: str) -> None:
    run("lsq_worker.py", kind, name)
