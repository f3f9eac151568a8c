"""Changing a model in one step: an exception at any point, Ctrl-C too, leaves the old model or the new one.

`install` replaces entries of tables (parameters, buffers, attributes of modules). What takes more than that, such as
exchanging the class of a module, runs inside `all_or_nothing`. Make first what is to be installed, then install it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from operator import delitem, setitem
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

T = TypeVar("T", bound=Tensor)

REMOVED: Any = object()
"""As the value of a `Change`: the entry goes."""

TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes of a module that hold its parts."""


class Change(NamedTuple):
    """``table[key] = value``; a table is ``module._parameters``, ``module._buffers``, ``vars(module)``, ..."""

    table: MutableMapping[str, Any]
    key: str
    value: Any


def install(changes: Iterable[Change]) -> None:
    """Make all changes, or none.

    They run as one call into the interpreter's C code, in which no signal is handled: Ctrl-C comes before or after.
    """
    changes = list(changes)
    tables = {id(table): table for table, _, _ in changes}
    steps = [
        partial(delitem, table, key) if value is REMOVED else partial(setitem, table, key, value)
        for table, key, value in changes
    ]
    with _RolledBack([_contents(table) for table in tables.values()]):
        _run(steps)


def all_or_nothing(modules: Iterable[nn.Module]) -> _RolledBack:
    """Context manager: an exception inside gives these modules back their classes, attributes, parameters, buffers and
    submodules as they were. What is changed inside those, the data of a tensor say, stays changed.

    Args:
        modules: all that the block changes.
    """
    return _RolledBack([undo for module in dict.fromkeys(modules) for undo in _states(module)])


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """Attributes that the user, or a framework, has put on a parameter or buffer, for the one that takes its place."""
    if type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
        return dict(vars(tensor))
    # Those of a subclass may be its own; quantized ones know which are not.
    own: Callable[[], dict[str, Any]] = getattr(tensor, "_extra_state", dict)
    return own()


def keep_attributes(new: T, old: Tensor) -> T:
    """`new`, which takes the place of `old`, with the `user_attributes` of `old`; none hides what `new` has itself."""
    vars(new).update({name: value for name, value in user_attributes(old).items() if not hasattr(new, name)})
    return new


class _RolledBack:
    """Runs `undo` where its block is left by an exception."""

    def __init__(self, undo: Sequence[Sequence[partial[Any]]]) -> None:
        self.undo = [step for steps in undo for step in steps]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            _run(self.undo)


def _run(steps: list[partial[Any]]) -> None:
    deque(map(partial.__call__, steps), 0)


def _contents(table: Any) -> list[partial[Any]]:
    """Give a dict or set its entries back, in their order."""
    return [partial(table.clear), partial(table.update, table.copy())]


def _states(module: nn.Module) -> list[list[partial[Any]]]:
    own_class = [partial(object.__setattr__, module, "__class__", type(module))]
    return [own_class, _contents(vars(module)), *[_contents(vars(module)[name]) for name in TABLES]]
