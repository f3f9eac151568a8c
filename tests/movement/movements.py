"""The columns of docs/reference/movement.md: a function for each movement, which says what must hold after it.

A cell is "yes" if the function returns. It is a reason of `reasons.REASONS` if it raises an error whose words are
those of the reason, and nothing has changed; everything else is wrong.
"""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tests.movement import holding, kinds, reasons


class Case:
    """A module of a kind that has been called, so that kernels remember its weight."""

    def __init__(self, kind: kinds.Kind) -> None:
        self.kind = kind
        self.module: torch.nn.Module = kind.make()
        self.output: torch.Tensor = holding.output(self.module, kind)
        assert torch.equal(holding.output(self.module, kind), self.output)

    @property
    def weight(self) -> torch.Tensor:
        return self.module.weight  # type: ignore[return-value]

    @cached_property
    def other(self) -> torch.nn.Module:
        """One with other numbers."""
        return self.kind.make(seed=2)


@dataclass(frozen=True)
class Movement:
    """A column.

    Attributes:
        name, group: on the page.
        run: raises where something does not hold; of a `Case`, or between processes of a `Kind`.
    """

    name: str
    group: str
    run: Callable[[Any], None]


TRACES = bool(os.environ.get("MOVEMENT_TRACES"))
"""Print where errors are raised."""

MOVEMENTS: dict[str, Movement] = {}


def movement(group: str, name: str) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Decorator: make a function a column."""

    def decorate(function: Callable[[Case], None]) -> Callable[[Case], None]:
        assert name not in MOVEMENTS
        MOVEMENTS[name] = Movement(name, group, function)
        return function

    return decorate


def cell(run: Callable[[], object]) -> str:
    """``"yes"`` if `run` returns, the name of a reason if it raises one, or ``"wrong: ..."``."""
    try:
        run()
    except AssertionError as error:
        return f"wrong: {error or 'AssertionError'}"
    except Exception as error:
        if TRACES:
            traceback.print_exc()
        return reasons.reason_of(error)
    return "yes"


def outcome(column: Movement, kind: kinds.Kind) -> str:
    """The cell of a movement in one process."""
    case = Case(kind)
    before = holding.snapshot(case.module)
    found = cell(lambda: column.run(case))
    if found != "yes" and not found.startswith("wrong"):
        try:
            holding.unchanged(case.module, before)
            assert torch.equal(holding.output(case.module, kind), case.output), "after the error: another output"
        except AssertionError as changed:
            return f"wrong: {changed}"
    return found
