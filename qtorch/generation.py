"""Invalidation of cached choices of kernels when settings or kernels change."""

from __future__ import annotations

from collections.abc import Callable


class Generation:
    """Counter of changes of the settings and of all else that the choice of kernels depends on.

    Cached choices are valid as long as `number` is unchanged; `listeners` are called when it has changed, for caches
    that cannot look at it.
    """

    __slots__ = ("listeners", "number")

    def __init__(self) -> None:
        self.number = 0
        self.listeners: list[Callable[[], None]] = []

    def end(self) -> None:
        """Invalidate cached choices, after a change."""
        self.number += 1
        for listener in self.listeners:
            listener()


generation = Generation()
