"""Two gloo processes: FSDP2 with bf16 parameters; checkpoints of 2 ranks, read by 1 and again by 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


def run(ranks: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", str(Path(__file__).with_name("dcp_worker.py")), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert all(done.stdout.count(f"rank {rank} ok") == 1 for rank in range(ranks))


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_resharding(tmp_path: Path) -> None:
    """A run that is saved by 2 ranks goes on with 2, or over 1 with 2, as if it had not stopped."""
    for action, ranks in (("start", 2), ("resume", 2), ("whole", 1), ("back", 2)):
        run(ranks, action, str(tmp_path))
