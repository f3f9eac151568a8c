"""Settings of the whole library: ``qtorch.config.strict = True``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any


class Generation:
    """Counter of changes of the settings and of all else that the choice of kernels depends on. Cached choices are
    valid as long as `number` is unchanged; `listeners` are called when it has changed, for caches that cannot look at
    it."""

    def __init__(self) -> None:
        self.number = 0
        self.listeners: list[Callable[[], None]] = []

    def end(self) -> None:
        """Invalidate cached choices, after a change."""
        self.number += 1
        for listener in self.listeners:
            listener()


generation = Generation()


@dataclass
class Config:
    """Process-wide switches.

    Attributes:
        strict: raise an error instead of a warning when falling back to the reference implementation, or to emulation
            of a format that the device cannot multiply.
        float_copy_bytes: memory in bytes that dequantized copies of weights may take on CPU, in total, in addition to
            the weights. A copy is kept for a weight-only layer whose inputs have so many rows that F.linear is faster
            than any kernel that reads codes; it is dropped when the weight changes or is deleted. At 0, the default, no
            copies are kept: such a layer is dequantized on each call. Without compiled kernels this holds for any
            number of rows, but not for int8 with a scale per row, nor for scales that are quantized themselves.
    """

    strict: bool = False
    float_copy_bytes: int = 0

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(getattr(type(self), name, None))
        if type(value) is not kind:
            what = f"takes {kind.__name__}, got {value!r}" if kind is not NoneType else "is no setting"
            raise TypeError(f"qtorch.config.{name} {what}; there are strict (bool) and float_copy_bytes (int)")
        super().__setattr__(name, value)
        generation.end()

    @contextmanager
    def patch(self, **changes: Any) -> "Iterator[Config]":
        """Change settings for the duration of a ``with`` block.

        Raises:
            ValueError: there is no such setting.
        """
        if unknown := sorted(set(changes) - set(vars(self))):
            raise ValueError(f"qtorch.config has no setting {', '.join(unknown)}; it has {', '.join(vars(self))}")
        before = dict(vars(self))
        vars(self).update(changes)
        generation.end()
        try:
            yield self
        finally:
            vars(self).update(before)
            generation.end()


config = Config()
