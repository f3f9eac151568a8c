"""Invalidation of cached choices of kernels when settings or kernels change."""

from __future__ import annotations


class Generation:
    """Counter of changes of the settings and of all else that the choice of kernels depends on.

    Cached choices are valid as long as `number` is unchanged.
    """

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def end(self) -> None:
        """Invalidate cached choices, after a change."""
        self.number += 1


generation = Generation()
