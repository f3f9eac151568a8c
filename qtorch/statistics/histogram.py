"""Histogram: how often the inputs of a weight take which values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..primitives.non_finite import finite_rows
from .ranges import Range

BINS = 8192
"""Of [-R, R): at most 4096, and more than 2048, are between zero and the largest magnitude."""

_SLICE = 1 << 22
"""Elements that are counted at a time."""

_SMALLEST = -100
"""Of the exponent: the inverse of a narrower bin would overflow fp32."""


class Histogram(Range):
    """Counts of the inputs in `BINS` equal bins of [-R, R), and their exact extremes.

    R is the power of two above the largest magnitude. When a larger one comes, R doubles and bins are joined in pairs:
    edges of the new bins are edges of the old ones. So counts depend on all rows together and not on their order, and
    `merge` gives those of one pass exactly.

    Attributes:
        counts: (BINS,) int64; None before the first row.
        exponent: log2 of R.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Tensor | None = None
        self.exponent = _SMALLEST

    def update(self, rows: Tensor) -> None:
        rows = finite_rows(rows)
        if not rows.numel():
            return
        super().update(rows)
        largest = float(torch.maximum(-self.low, self.high))
        self._widen_to(max(self.exponent, math.frexp(largest)[1]))
        # A product with a power of two is exact, so each element is in its bin.
        per_bin = 1 / self.width
        counts = torch.zeros(BINS, dtype=torch.int64, device=rows.device)
        for part in rows.reshape(-1).split(_SLICE):
            index = part.float().mul(per_bin).floor_().add_(BINS // 2).to(torch.int64)
            counts += torch.bincount(index, minlength=BINS)
        self.counts = counts if self.counts is None else self.counts.to(counts.device) + counts

    def merge(self, other: Range) -> None:
        super().merge(other)
        if not isinstance(other, Histogram) or other.counts is None:
            return
        self._widen_to(max(self.exponent, other.exponent))
        counts = _joined(other.counts, self.exponent - other.exponent)
        self.counts = counts if self.counts is None else self.counts + counts.to(self.counts.device)

    def _widen_to(self, exponent: int) -> None:
        if self.counts is not None:
            self.counts = _joined(self.counts, exponent - self.exponent)
        self.exponent = exponent

    @property
    def width(self) -> float:
        """Of a bin, a power of two."""
        return math.ldexp(2.0 / BINS, self.exponent)

    def occupied(self) -> tuple[Tensor, Tensor]:
        """(values, counts) of the bins that are not empty, in rising order: their middle, moved into [low, high], fp32;
        and how many elements they hold, fp32.

        Raises:
            ValueError: no row was seen.
        """
        if self.counts is None:
            raise ValueError("Histogram: no row was seen")
        bins = self.counts.nonzero().squeeze(1)
        values = (bins - BINS // 2 + 0.5).float() * self.width
        return torch.clamp(values, self.low, self.high), self.counts[bins].float()


def _joined(counts: Tensor, doublings: int) -> Tensor:
    """The counts for a range that is 2^doublings times as wide."""
    if not doublings:
        return counts
    bins = torch.arange(BINS, device=counts.device) - BINS // 2
    index = (bins >> min(doublings, 62)) + BINS // 2
    return torch.zeros_like(counts).index_add_(0, index, counts)
