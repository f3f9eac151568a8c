"""The rows of the matrix: a table of operations, each a function of a `Subject`, that the files beside this one fill.

An operation works if its function returns; it is refused if it raises a clear error whose words match `refuses`, or
`Refused`; everything else is wrong. To add a row, write a function here or in one of these files:

@operation("Copies", "`copy.deepcopy(model)`")
def deepcopy(subject: Subject) -> None: ...
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.attack.subject import Subject
from tests.movement.reasons import CLEAR


class Refused(Exception):
    """What was asked is refused, by an error with these words, and nothing has changed."""


@dataclass(frozen=True)
class Operation:
    """A row.

    Attributes:
        group, title: of the row in docs/reference/behaviour.md.
        refuses: what the words of an error must match, where there may be one.
        run: the function.
        few: for some recipes only, one of each family, as each takes seconds.
        may_kill: where memory is not ours a process dies; it runs in one of its own.
    """

    group: str
    title: str
    run: Callable[[Subject], None]
    refuses: str | None = None
    few: bool = False
    may_kill: bool = False

    def outcome(self, subject: Subject) -> str:
        """``"works"``, ``"refused: <words>"`` or ``"wrong: <what>"``."""
        try:
            self.run(subject)
        except Refused as error:
            return f"refused: {first_words(error)}"
        except AssertionError as error:
            return f"wrong: {_one_line(error) or 'AssertionError'}"
        except CLEAR as error:
            if self.refuses is not None and re.search(self.refuses, str(error)):
                return f"refused: {first_words(error)}"
            return f"wrong: {type(error).__name__}: {_one_line(error)}"
        except Exception as error:
            return f"wrong: {type(error).__name__}: {_one_line(error)}"
        return "works"


OPERATIONS: dict[str, Operation] = {}
"""By the name of the function."""


def operation(
    group: str, title: str, refuses: str | None = None, few: bool = False, may_kill: bool = False
) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    """Decorator: make a function a row."""

    def decorate(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
        add(function.__name__, Operation(group, title, function, refuses, few, may_kill))
        return function

    return decorate


def add(name: str, row: Operation) -> None:
    """A row, under a name of its own."""
    assert name not in OPERATIONS, name
    OPERATIONS[name] = row


def first_words(error: BaseException, length: int = 72) -> str:
    """The beginning of an error's first line."""
    line = _one_line(error)
    return line if len(line) <= length else line[:length].rsplit(" ", 1)[0] + " ..."


def _one_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


# --- what the rows share ---
ROWS = (1, 3, 64)


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of a few and of many rows; always the same."""
    from tests.attack.subject import K

    generator = torch.Generator().manual_seed(7)
    return [torch.randn(rows, K, generator=generator).to(dtype) for rows in ROWS]


@torch.no_grad()
def outputs(layer: torch.nn.Module) -> list[torch.Tensor]:
    """Of `layer` in evaluation mode."""
    training = layer.training
    layer.eval()
    result = [layer(x) for x in inputs()]
    layer.train(training)
    return result


def same(got: list[torch.Tensor], wanted: list[torch.Tensor], what: str, bound: float = 2e-5) -> None:
    """Assert that two lists of outputs are equal up to the order of sums."""
    for y, y0 in zip(got, wanted, strict=True):
        assert y.shape == y0.shape, f"{what}: shape {tuple(y.shape)}, not {tuple(y0.shape)}"
        assert bool(y.isfinite().all()) == bool(y0.isfinite().all()), f"{what}: not finite"
        error = float((y.double() - y0.double()).norm() / y0.double().norm().clamp(min=1e-30))
        assert error <= bound, f"{what}: relative error {error:.2g}"


def attempt(call: Callable[[], object], layer: torch.nn.Module, refuses: str | None = None) -> None:
    """Run `call`; where it raises a clear error that matches `refuses`, assert that `layer` is what it was and raise
    `Refused`."""
    before = outputs(layer)
    try:
        call()
    except CLEAR as error:
        if refuses is None or not re.search(refuses, str(error)):
            raise
        same(outputs(layer), before, f"after the error {first_words(error, 40)!r} the layer has changed", 0)
        raise Refused(str(error)) from error
