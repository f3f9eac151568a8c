"""Two gloo processes: the gradients of adapters under DistributedDataParallel and FSDP2 are those of one
process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_ddp_and_fsdp() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", str(Path(__file__).with_name("ddp_worker.py"))]
    environment = {**os.environ, "QTORCH_CPU_KERNELS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("rank 0 ok") == done.stdout.count("rank 1 ok") == 1
