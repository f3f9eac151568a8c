"""What trains and what serves over gloo processes; each worker, and each tutorial, says what must hold."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.distributed.processes import run, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]

CASES = [("fsdp_worker.py",), ("split_worker.py",), ("int8_gradients_worker.py",)]
CASES += [("training_worker.py", kind) for kind in ("ddp", "fsdp")]


NEEDS_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")


@pytest.mark.parametrize("case", [*CASES, pytest.param(("adapters_worker.py",), marks=NEEDS_PEFT)], ids=" ".join)
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


def test_tensor_parallel() -> None:
    said = torchrun("-m", "tutorials.tensor_parallel", "--short").splitlines()
    assert said[0] == "each of 2 processes has 50% of the weights in the blocks"
    losses = [re.findall(r"\d\.\d+", line) for line in said[1:4]]
    assert all(ours == alone for ours, alone in losses)
    assert float(losses[-1][0]) < 0.9 * float(losses[0][0])
    assert said[4] == "largest difference of a weight: 0.0"
    difference = re.fullmatch(r"frozen, in INT8: logits differ by (\S+) from one process", said[5])
    # A rounding of fp32, or of some activations by a step, of which there are 127.
    assert float(difference[1]) < 1 / 127


def losses(said: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+): loss (\S+)", said)}


def test_fsdp_int8(tmp_path: Path) -> None:
    """The second half on one process is that on two: codes are those of whole rows, sums have another order, and the
    noise of rounding differs."""
    command = ["-m", "tutorials.fsdp_int8", "--weights", "int8", "--short", "--checkpoint", str(tmp_path)]
    said = torchrun(*command)
    whole = losses(said)
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    assert whole[6] < 0.8 * whole[1]
    (of_two,) = re.findall(r"processes: 2; bytes of weights in each: ([\d,]+)", said)
    said = torchrun(*command, "--resume", "3", ranks=1)
    resumed = losses(said)
    assert list(resumed) == [4, 5, 6]
    # The weights of the fourth step are those that were saved.
    assert resumed[4] == pytest.approx(whole[4], abs=2e-5)
    assert resumed[6] == pytest.approx(whole[6], rel=2e-3)
    (of_one,) = re.findall(r"processes: 1; bytes of weights in each: ([\d,]+)", said)
    assert int(of_one.replace(",", "")) == 2 * int(of_two.replace(",", ""))
