"""Parameters of which the fast part of the tests takes a few: those that stand for the others."""

from collections.abc import Collection, Container, Iterable
from typing import Any

import pytest

MATRIX = (pytest.mark.slow, pytest.mark.matrix)
"""Of numbers that `make machines` and the sanitizers look at too."""


def matrix_but(fast: Container[Any], values: Iterable[Any]) -> list[Any]:
    """All values of one argument for `parametrize`; those that are not `fast` are slow, and part of a matrix."""
    return [value if value in fast else pytest.param(value, marks=MATRIX) for value in values]


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases for `parametrize`, tuples where it has several arguments, those that are not `fast` marked as slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in fast else pytest.mark.slow)
        for case in cases
    ]
