"""Observer: how the range of an activation is chosen from what was seen of it.

An observer names a statistic, which is collected while the model runs on data, and turns it into a range; the
`QuantSpec` of the activation turns that into scale and zero point. A new observer is a file with a frozen dataclass.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from typing_extensions import dataclass_transform

from ...primitives import QuantSpec
from ...primitives.jsonable import call_of, jsonable
from ..statistics import Statistic

OBSERVERS: "dict[str, type[Observer]]" = {}
"""By the word for which `qat(observer=...)` and `calibrated(observer=...)` take them."""

MinMax = tuple[Tensor, Tensor]

O = TypeVar("O", bound="type[Observer]")  # noqa: E741


class Observer:
    """Base class of observers: frozen dataclasses, printable, comparable, JSON-able.

    Attributes:
        name: the function that makes it, and the word for it with its default arguments.
        statistic: what is collected of the inputs.
        follows: in training, the range changes with each batch (see `follow`); otherwise it stays as it was chosen by
            `qtorch.training.calibrate`.
        memory: how many numbers for each range it keeps from batch to batch, beside the range itself; then training
            calls `measure` and `follow_measured` in place of `follow`.
    """

    name: ClassVar[str]
    statistic: ClassVar[type[Statistic]]
    follows: ClassVar[bool] = False
    memory: ClassVar[int] = 0

    def range(self, seen: Any, spec: QuantSpec) -> MinMax:
        """The range (low, high) to represent, 0-d fp32.

        Args:
            seen: a `statistic` that has seen at least one row.
            spec: of the activation, with one scale for the tensor.
        """
        raise NotImplementedError

    def follow(self, now: MinMax, batch: MinMax) -> MinMax:
        """The range after a batch in training whose own is `batch`; `now` is NaN before the first. Of any shape."""
        raise NotImplementedError

    def measure(self, blocks: Tensor) -> Tensor:
        """What is to be known of a batch: (k, blocks), fp32, from the elements of its blocks (blocks, elements)."""
        raise NotImplementedError

    def follow_measured(self, memory: Tensor, measured: Tensor) -> tuple[Tensor, MinMax]:
        """The new memory, and the range of the batch.

        Args:
            memory: (m, *shape of the scale), of `memory` numbers, zeros before the first batch.
            measured: (k, *shape of the scale), the mean over the processes that train together.
        """
        raise NotImplementedError

    __repr__ = call_of


@dataclass_transform(frozen_default=True)
def register_observer(name: str) -> Callable[[O], O]:
    """Class decorator: make a frozen dataclass, unless it is one, the observer `name`, readable from JSON.

    Raises:
        ValueError: another observer has the same name.
    """

    def decorate(cls: O) -> O:
        if OBSERVERS.setdefault(name, cls) is not cls:
            raise ValueError(f"register_observer: {name!r} is taken by {OBSERVERS[name]!r}")
        cls.name = name
        jsonable(cls, repr=False)
        return cls

    return decorate


def observer_of(given: Any, caller: str) -> Observer:
    """The observer that `given`, an observer or the word for one, stands for."""
    if isinstance(given, Observer):
        return given
    if isinstance(given, str) and given in OBSERVERS:
        return OBSERVERS[given]()
    words = ", ".join(sorted(OBSERVERS))
    called = f"; call it: {given.name}()" if isinstance(given, type) and issubclass(given, Observer) else ""
    raise ValueError(f"{caller}: observer is an observer such as mse(), or a word of {words}; got {given!r}{called}")
