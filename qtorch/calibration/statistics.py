"""Statistic: a statistic of the inputs of a weight, accumulated over batches, that a recipe can request.

A weight (N, K) multiplies rows x of K numbers. A statistic sees these rows: the inputs of a linear layer, or the
windows of a convolution in the order of its weight viewed as a matrix. It is accumulated in fp32, does not depend on
how rows are split into batches except for rounding, and `merge` combines those of two processes.

A new statistic is a subclass; a recipe lists it in `Recipe.statistics` and `Recipe.make` gets it as an argument.
"""

from __future__ import annotations

import math
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..primitives.affine import finite_rows

S = TypeVar("S", bound="Statistic")

BLENDED = 0.03
"""What a token counts for in the statistics of an expert to which the router does not send it."""


class Statistic:
    """Base class of statistics of the inputs of one weight.

    Attributes:
        paired: it takes the inputs of the float model beside those of the model as quantized so far.
        per_expert: each matrix of a weight (E, N, K) has one of its own; otherwise they have one together.
        lists: names of the lists of what it keeps of each batch, of statistics that keep nothing else.
        rows: number of rows seen so far.
    """

    paired: ClassVar[bool] = False
    per_expert: ClassVar[bool] = True
    lists: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.rows = 0

    def update(self, rows: Tensor) -> None:
        """Add inputs (M, K), in floating point."""
        raise NotImplementedError

    def update_pair(self, rows: Tensor, of_float: Tensor) -> None:
        """Add inputs (M, K), beside those of the float model for the same tokens."""
        self.update(rows)

    def update_residual(self, rows: Tensor, error: Tensor) -> None:
        """Take note of (M, N), what the residual stream of the quantized model lacks for these inputs."""

    def end_batch(self) -> None:
        """Called after the last rows of each batch."""

    def close(self) -> None:
        """Called when no row will be added: the mean may take the place of the sum."""

    def merge(self: S, other: S) -> None:
        """Add all rows that `other` has seen, after those of this one; both are between two batches. Of the statistics
        that observers use."""
        if not self.lists:
            raise NotImplementedError
        for name in self.lists:
            getattr(self, name).extend(getattr(other, name))
        self.rows += other.rows


class NoInputs(Statistic):
    """In place of the statistics of a weight that has none; `reason` says why: "the data does not use it"."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


Statistics = dict[type[Statistic], Statistic]
"""The requested statistics of one weight, by class."""


class Sum(Statistic):
    """Base class of statistics that are a mean over rows: `of` returns the sum over some rows, `mean` the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor | None = None
        self.blended = 0.0
        self.closed = False

    @property
    def count(self) -> float:
        """Rows seen, and those of `blend` at what they count for."""
        return self.rows + self.blended

    def close(self) -> None:
        if self.total is not None and self.count and not self.closed:
            self.total.div_(self.count)  # the mean, without a second matrix (K, K)
        self.closed = True

    def of(self, rows: Tensor) -> Tensor:
        """The sum over these rows, which are in fp32."""
        raise NotImplementedError

    def update(self, rows: Tensor) -> None:
        if self.closed:
            raise ValueError(f"{type(self).__name__}: is closed; collect a new statistic for more rows")
        self.total = _sum(self.total, self.of(rows.float()))
        self.rows += rows.shape[0]

    def blend(self, rows: Tensor, of_float: Tensor) -> None:
        """Add rows that an expert would get if the router sent it all tokens; each counts for `BLENDED` of a row."""
        self.total = _sum(self.total, self.of(rows.float()).mul_(BLENDED))
        self.blended += BLENDED * len(rows)

    @property
    def mean(self) -> Tensor:
        """The mean over all rows seen."""
        if self.total is None or not self.count:
            raise ValueError(f"{type(self).__name__}: no row was seen")
        return self.total if self.closed else self.total / self.count


def _sum(total: Tensor | None, added: Tensor) -> Tensor:
    return added if total is None else total.add_(added.to(total.device))


class MeanSquare(Sum):
    """E[x_k^2], (K,): the diagonal of `SecondMoment`, the importance of each column of the weight."""

    def of(self, rows: Tensor) -> Tensor:
        return rows.square().sum(0)


class SecondMoment(Sum):
    """E[x x^T], (K, K): half the Hessian of |X (W - Q)^T|^2 / M with respect to each row of the weight.

    Source: GPTQ, arXiv 2210.17323, section 3.
    """

    def of(self, rows: Tensor) -> Tensor:
        return rows.t() @ rows


class Moments(SecondMoment):
    """`SecondMoment` of the inputs x~ of the model as quantized so far, and their products with those, x, in floats."""

    paired: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.cross_total: Tensor | None = None
        self.residual_total: Tensor | None = None

    def close(self) -> None:
        if self.cross_total is not None and self.count and not self.closed:
            self.cross_total.div_(self.count)
        super().close()

    def update_pair(self, rows: Tensor, of_float: Tensor) -> None:
        self.update(rows)
        self.cross_total = _sum(self.cross_total, of_float.float().t() @ rows.float())

    def blend(self, rows: Tensor, of_float: Tensor) -> None:
        super().blend(rows, of_float)
        self.cross_total = _sum(self.cross_total, (of_float.float().t() @ rows.float()).mul_(BLENDED))

    def update_residual(self, rows: Tensor, error: Tensor) -> None:
        self.residual_total = _sum(self.residual_total, error.float().t() @ rows.float())

    @property
    def cross(self) -> Tensor | None:
        """E[x x~^T], (K, K); None if the float model was not run."""
        if self.cross_total is None or self.closed:
            return self.cross_total
        return self.cross_total / self.count

    @property
    def residual(self) -> Tensor | None:
        """E[(r - r~) x~^T], (N, K), r the residual stream; None if the output of the layer is not added to one."""
        return None if self.residual_total is None else self.residual_total / self.rows


class Range(Statistic):
    """The smallest and the largest of all inputs, `low` and `high`, 0-d fp32. Rows that hold a NaN or an infinity do
    not count, here and in the statistics below: inference keeps them apart, too."""

    per_expert: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.low: Tensor = torch.tensor(torch.inf, dtype=torch.float32, device="cpu")
        self.high: Tensor = torch.tensor(-torch.inf, dtype=torch.float32, device="cpu")

    def update(self, rows: Tensor) -> None:
        rows = finite_rows(rows)
        if rows.numel():
            low, high = rows.aminmax()
            self._widen(low.float(), high.float(), rows.shape[0])

    def merge(self, other: Range) -> None:
        self._widen(other.low, other.high, other.rows)

    def _widen(self, low: Tensor, high: Tensor, rows: int) -> None:
        self.low = torch.minimum(self.low.to(low.device), low)
        self.high = torch.maximum(self.high.to(high.device), high)
        self.rows += rows


class BatchMagnitudes(Statistic):
    """All magnitudes of each batch, in the order seen, up to `LIMIT` of a batch at equal distances: `batches`, fp32."""

    per_expert: ClassVar[bool] = False
    lists: ClassVar[tuple[str, ...]] = ("batches",)

    LIMIT: ClassVar[int] = 1 << 16

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Tensor] = []
        self.current: list[Tensor] = []

    def update(self, rows: Tensor) -> None:
        rows = finite_rows(rows)
        if rows.numel():
            self.rows += rows.shape[0]
            self.current.append(rows.abs().reshape(-1)[:: -(-rows.numel() // self.LIMIT)].float())

    def end_batch(self) -> None:
        if self.current:
            self.batches.append(torch.cat(self.current))
        self.current = []


class BatchRanges(Statistic):
    """The range of each batch, in the order seen: `lows` and `highs`, 0-d fp32; batches without rows have none."""

    per_expert: ClassVar[bool] = False
    lists: ClassVar[tuple[str, ...]] = ("lows", "highs")

    def __init__(self) -> None:
        super().__init__()
        self.lows: list[Tensor] = []
        self.highs: list[Tensor] = []
        self.batch = Range()

    def update(self, rows: Tensor) -> None:
        before = self.batch.rows
        self.batch.update(rows)
        self.rows += self.batch.rows - before

    def end_batch(self) -> None:
        if self.batch.rows:
            self.lows.append(self.batch.low)
            self.highs.append(self.batch.high)
        self.batch = Range()


BINS = 8192
"""Of [-R, R): at most 4096, and more than 2048, are between zero and the largest magnitude."""

_SLICE = 1 << 22
"""Elements that are counted at a time."""

_SMALLEST = -100
"""Of the exponent: the inverse of a narrower bin would overflow fp32."""


class Histogram(Range):
    """Counts of the inputs in `BINS` equal bins of [-R, R), R = 2^exponent, and their exact extremes.

    R is the power of two above the largest magnitude. When a larger one comes, R doubles and bins are joined in pairs:
    edges of the new bins are edges of the old ones. So counts depend on all rows together and not on their order, and
    `merge` gives those of one pass exactly.
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
        exponent = max(self.exponent, math.frexp(largest)[1])
        # A product with a power of two is exact, so each element is in its bin.
        per_bin = 1 / math.ldexp(2.0 / BINS, exponent)
        counts = torch.zeros(BINS, dtype=torch.int64, device=rows.device)
        for part in rows.reshape(-1).split(_SLICE):
            index = part.float().mul(per_bin).floor_().add_(BINS // 2).to(torch.int64)
            counts += torch.bincount(index, minlength=BINS)
        self._add(counts, exponent)

    def merge(self, other: Range) -> None:
        super().merge(other)
        if isinstance(other, Histogram) and other.counts is not None:
            self._add(other.counts, other.exponent)

    def _add(self, counts: Tensor, exponent: int) -> None:
        """Add counts of [-2^exponent, 2^exponent), where both are of the wider of the two ranges."""
        widest = max(self.exponent, exponent)
        counts = _joined(counts, widest - exponent)
        if self.counts is not None:
            counts = _joined(self.counts, widest - self.exponent).to(counts.device) + counts
        self.counts, self.exponent = counts, widest

    @property
    def width(self) -> float:
        """Of a bin, a power of two."""
        return math.ldexp(2.0 / BINS, self.exponent)

    def occupied(self) -> tuple[Tensor, Tensor]:
        """(values, counts) of the bins that are not empty, in rising order: their middle, moved into [low, high], fp32;
        and how many elements they hold, fp32.
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
