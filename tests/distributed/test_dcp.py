"""torch.distributed.checkpoint of quantized models: a rank that dies in a save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.processes import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]


def test_a_rank_that_dies_in_a_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    run("dcp_worker.py", "save", str(tmp_path))
    with pytest.raises(AssertionError):
        run("dcp_worker.py", "crash", str(tmp_path), seconds=120)
    assert list((tmp_path / "crashed").iterdir())
    assert not (tmp_path / "crashed" / ".metadata").exists()  # what is there can't be taken for a checkpoint
    run("dcp_worker.py", "load", str(tmp_path))
