"""FSDP2 of quantized weights in two processes: exactly what one process computes, for even and uneven shards."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.processes import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]


@pytest.mark.parametrize("name", ["recipes", "others"])
def test_fsdp(name: str) -> None:
    run("fsdp_worker.py", name)
