"""Inner tensors that are resized, set, transposed, exchanged or freed after a weight was made, and before or after a
kernel has remembered where they lie: a clear error or the new numbers, never a crash, never memory of others."""

from tests.attack import workers
from tests.attack.moved_memory import CASES


def test_every_change_of_every_tensor() -> None:
    found = workers.failures("tests.attack.moved_memory", 0, len(CASES))
    assert not found, f"{len(found)} of {len(CASES)}:\n" + "\n".join(found[:40])


def test_the_cases_are_there() -> None:
    assert len(CASES) > 1000
    assert {"qdata", "scale", "zero_point"} <= {case.tensor for case in CASES}
