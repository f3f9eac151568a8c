"""What trains and what serves over gloo processes; each worker says what must hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.processes import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]

CASES = [
    ("fsdp_worker.py",),
    ("split_worker.py",),
    ("tensor_parallel_worker.py",),
    ("ddp_worker.py",),
    *(("training_worker.py", name) for name in ("int8_mixed_precision", "int8_weights", "qat")),
    *(("training_worker.py", name) for name in ("bitnet", "bitnet_precomputed")),
    *(("lsq_worker.py", kind, name) for kind in ("ddp", "fsdp") for name in ("lsq", "lsq_plus", "first_batch", "qat")),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_two_processes(case: tuple[str, ...]) -> None:
    run(*case)


def test_a_mesh_of_two_axes() -> None:
    """Two replicas of two shards."""
    run("hsdp_worker.py", ranks=4)


def test_resharding(tmp_path: Path) -> None:
    """A run that is saved by 2 ranks goes on with 2, or over 1 with 2, as if it had not stopped."""
    for action, ranks in (("start", 2), ("resume", 2), ("whole", 1), ("back", 2)):
        run("optim_worker.py", action, str(tmp_path), ranks=ranks)
