"""Weights in training, cut by columns and rows over two processes, train as in one process."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.processes import run


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_split() -> None:
    run("split_worker.py")
