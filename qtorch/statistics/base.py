"""Statistic: a statistic of the inputs of a weight, accumulated over batches, that a recipe can request.

A weight (N, K) multiplies rows x of K numbers. A statistic sees these rows: the inputs of a linear layer, or the
windows of a convolution in the order of its weight viewed as a matrix. It is accumulated in fp32, does not depend on
how rows are split into batches except for rounding, and `merge` combines those of two processes.

A new statistic is a subclass; a recipe lists it in `Recipe.statistics` and `Recipe.make` gets it as an argument.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from torch import Tensor

S = TypeVar("S", bound="Statistic")


class Statistic:
    """Base class of statistics of the inputs of one weight.

    Attributes:
        paired: it takes the inputs of the float model beside those of the model as quantized so far.
        per_expert: each matrix of a weight (E, N, K) has one of its own; otherwise they have one together.
        rows: number of rows seen so far.
    """

    paired: ClassVar[bool] = False
    per_expert: ClassVar[bool] = True

    def __init__(self) -> None:
        self.rows = 0

    def update(self, rows: Tensor) -> None:
        """Add inputs (M, K), in floating point."""
        raise NotImplementedError

    def end_batch(self) -> None:
        """Called after the last rows of each batch."""

    def close(self) -> None:
        """No row will be added: what is in memory may become what is asked for."""

    def merge(self: S, other: S) -> None:
        """Add all rows that `other` has seen."""
        raise NotImplementedError


class Missed(Statistic):
    """In place of the statistics of a weight that has none: why.

    Attributes:
        reason: a clause, such as "the data does not use it".
    """

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


Statistics = dict[type[Statistic], Statistic]
"""The requested statistics of one weight, by class."""
