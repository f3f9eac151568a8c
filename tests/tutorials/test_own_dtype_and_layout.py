"""tutorials/own_dtype_and_layout.py in its short form: layouts change sizes and no number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("sklearn")

from qtorch.primitives.layouts import LAYOUTS
from qtorch.primitives.qdtype import QDTYPES


@pytest.fixture
def registered() -> Iterator[None]:
    """Tests over all layouts and formats that run later in this process do not see those of the tutorial."""
    layouts, formats = dict(LAYOUTS), dict(QDTYPES)
    yield
    for registry, before in ((LAYOUTS, layouts), (QDTYPES, formats)):
        for name in set(registry) - set(before):
            del registry[name]


@pytest.mark.usefixtures("registered")
def test_it_runs() -> None:
    from tutorials import own_dtype_and_layout

    said: list[str] = []
    results = own_dtype_and_layout.main(["--short"], said.append)
    weights, groups = 64 * 256 + 256 * 10, (64 * 256 + 256 * 10) // 16
    assert {name: size for name, (_, size) in results.items()} == {
        "float": 4 * weights,
        "plain": weights + 4 * groups,
        "packed": weights // 2 + 4 * groups,
        "bit_planes": weights // 2 + 4 * groups,
        "with a kernel": weights // 2 + 4 * groups,
    }
    in_float, *others = [accuracy for accuracy, _ in results.values()]
    assert 50 < in_float <= 100
    assert len(set(others)) == 1, "the same numbers in every layout"
    assert in_float - 10 < others[0] <= 100
    assert any("without a kernel" in line and "reference implementation" in line for line in said)
    assert any(line.endswith("bit_planes_mm") for line in said)
    assert said[-1].endswith("the same weights")
