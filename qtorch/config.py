"""Settings of the whole library: ``qtorch.config.strict = True``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Config:
    """Process-wide switches.

    Attributes:
        strict: falling back to the reference implementation, or to the emulation of a format that the device cannot
            multiply, is an error instead of a warning.
    """

    strict: bool = False

    @contextmanager
    def patch(self, **changes: Any) -> Iterator[Config]:
        """Change settings for the duration of a ``with`` block.

        Raises:
            ValueError: no such setting.
        """
        if unknown := sorted(set(changes) - set(vars(self))):
            raise ValueError(f"qtorch.config has no setting {', '.join(unknown)}; it has {', '.join(vars(self))}")
        before = dict(vars(self))
        vars(self).update(changes)
        try:
            yield self
        finally:
            vars(self).update(before)


config = Config()
