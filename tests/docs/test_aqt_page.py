"""docs/reference/aqt.md: each feature of AQT is there, with yes, expressions that evaluate, and tests that exist."""

import re
from typing import Any

import pytest
import torch

import qtorch
import qtorch.calibration
import qtorch.primitives
import qtorch.training

from .pages import DOCS, ROOT

PAGE = (DOCS / "reference" / "aqt.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| AQT |")
]
FILES = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
TESTS = {name for text in FILES for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}


def names() -> dict[str, Any]:
    """What an expression may use."""
    found: dict[str, Any] = {"torch": torch, "batches": [torch.zeros(1, 4)]}
    for module in (qtorch.calibration, qtorch.primitives, qtorch, qtorch.training):
        found |= {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    clipping = qtorch.QuantSpec("int4", scale_rule=qtorch.primitives.AbsMaxRule(0.5))  # type: ignore[arg-type]
    return found | {"clipping": clipping}


def test_no_feature_is_missing() -> None:
    """What AQT v2 and AQTp have, a row each."""
    assert len({row[0] for row in ROWS}) == len(ROWS) == 32


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row(row: list[str]) -> None:
    _, answer, spelling, tested = row
    assert answer == "yes"
    expressions = re.findall(r"`([^`]+)`", spelling)
    assert expressions
    for expression in expressions:
        assert eval(expression, names()) is not None
    tests = re.findall(r"`(\w+)`", tested)
    assert tests
    assert [test for test in tests if test not in TESTS] == []
