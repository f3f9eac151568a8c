"""Parameters of which the fast part of the tests takes a few: those that stand for the others."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

MATRIX = (pytest.mark.slow, pytest.mark.matrix)
"""Of numbers that `make machines` and the sanitizers look at too."""


def slow_but(fast: Container[Any], values: Iterable[Any]) -> list[Any]:
    """All values for `parametrize`, those that are not `fast` marked as slow and as part of a matrix."""
    return [value if value in fast else pytest.param(value, marks=MATRIX) for value in values]
