"""FSDP2 of quantized weights in two processes: what `tests.movement` does not ask for each kind of tensor."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.processes import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]


def test_fsdp() -> None:
    run("fsdp_worker.py")


def test_a_mesh_of_two_axes() -> None:
    """Two replicas of two shards."""
    run("hsdp_worker.py", ranks=4)
