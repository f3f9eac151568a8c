"""Two gloo processes. FSDP2: a smoke test of what is gathered, and that two ranks train as one process does. DDP: that
replicas, seeded alike, stay equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(worker: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", str(Path(__file__).with_name(worker)), *arguments]
    # The workers count the products of the kernels made of torch operators.
    environment = {**os.environ, "QTORCH_CPU_KERNELS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("rank 0 ok") == done.stdout.count("rank 1 ok") == 1


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("name", ["int8_mixed_precision", "int8_weights", "bitnet", "bitnet_precomputed", "qat"])
def test_fsdp(name: str) -> None:
    run("fsdp_worker.py", name)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_ddp_replicas_stay_equal() -> None:
    run("ddp_worker.py")
