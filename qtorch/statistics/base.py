"""Statistic: what a recipe may ask to be told about the inputs of a weight, added up over batches.

A weight (N, K) multiplies rows x of K numbers. A statistic sees these rows, however the model came to them: those of a
linear layer, or the windows of a convolution in the order of its weight seen as a matrix. It is added up in fp32, does
not depend on how rows are split into batches beyond rounding, and `merge` joins those of two processes.

A new statistic is a subclass; a recipe names it in `Recipe.statistics` and finds it in what `Recipe.make` is given.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

S = TypeVar("S", bound="Statistic")


class Statistic:
    """Base of the statistics of the inputs of one weight.

    Attributes:
        rows: how many have been seen.
    """

    def __init__(self) -> None:
        self.rows = 0

    def update(self, rows: Tensor) -> None:
        """Take account of inputs (M, K), floating point."""
        raise NotImplementedError

    def merge(self: S, other: S) -> None:
        """Take account of all that `other` has seen."""
        raise NotImplementedError


Statistics = dict[type[Statistic], Statistic]
"""What was asked for of one weight, by its class."""
