"""Invalidation of what was found out for one choice of kernels, when settings or kernels change."""

from __future__ import annotations


class Generation:
    """Counts changes of the settings and of all else that the choice of kernels depends on: what was found out for one
    choice holds while `number` stays the same."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def end(self) -> None:
        """Something has changed."""
        self.number += 1


generation = Generation()
