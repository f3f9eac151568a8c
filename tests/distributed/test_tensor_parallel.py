"""DTensors of quantized weights in two processes."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.processes import run


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_tensor_parallel() -> None:
    run("tensor_parallel_worker.py")
