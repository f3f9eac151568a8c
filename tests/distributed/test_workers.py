"""What trains and what serves over gloo processes; each worker says what must hold."""

from pathlib import Path

import pytest
import torch

from tests.distributed.processes import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]

CASES = [("fsdp_worker.py",), ("split_worker.py",)]
CASES += [("training_worker.py", kind) for kind in ("ddp", "fsdp")]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_two_processes(case: tuple[str, ...]) -> None:
    run(*case)


def test_a_mesh_of_two_axes() -> None:
    run("fsdp_worker.py", ranks=4)


def test_resharding(tmp_path: Path) -> None:
    """A run that is saved by 2 ranks goes on with 2, or over 1 with 2, as if it had not stopped."""
    for action, ranks in (("start", 2), ("resume", 2), ("whole", 1), ("back", 2)):
        run("optim_worker.py", action, str(tmp_path), ranks=ranks)


def test_a_rank_that_dies_in_a_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    run("dcp_worker.py", "save", str(tmp_path))
    with pytest.raises(AssertionError):
        run("dcp_worker.py", "crash", str(tmp_path), seconds=120)
    assert list((tmp_path / "crash").iterdir())
    assert not (tmp_path / "crash" / ".metadata").exists()  # what is there can't be taken for a checkpoint
    run("dcp_worker.py", "load", str(tmp_path))
