"""Scale rules: choose the range [min, max] that the codes of a block should cover from its elements.

A rule implements `min_max(input, spec)`, which returns two fp32 tensors in the shape of the scale;
`choose_qparams_affine_with_min_max` turns them into scale and zero point. A new rule is a frozen dataclass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from .affine import MappingType
from .granularity import BlockView
from .jsonable import jsonable
from .learned_step import lsq_scale
from .non_finite import with_non_finite
from .numerics import Numerics
from .qparams import min_max

MinMax = tuple[Tensor, Tensor]


class Joins(Enum):
    """How the range of a block follows from the ranges of its parts."""

    EXTREMES = "the lowest minimum and the highest maximum"
    MEAN = "the means, each part counted by its elements"


class ScaleRule:
    """Base class of scale rules.

    Attributes:
        joins: how the range of a block that lies on several processes follows from theirs; None: it does not.
    """

    joins: ClassVar[Joins | None] = None

    def min_max(self, input: Tensor, spec: Numerics) -> MinMax:
        raise NotImplementedError


@jsonable
@dataclass(frozen=True)
class MinMaxRule(ScaleRule):
    """The whole range of the block; with a symmetric mapping, that is [-absmax, absmax]."""

    joins: ClassVar[Joins | None] = Joins.EXTREMES

    def min_max(self, input: Tensor, spec: Numerics) -> MinMax:
        return min_max(input, spec.block_size(input.shape))


@jsonable
@dataclass(frozen=True)
class AbsMaxRule(ScaleRule):
    """[-a, a] with a = `clipping_scale` max |x|, for every mapping; below 1, what is larger clips."""

    joins: ClassVar[Joins | None] = Joins.EXTREMES

    clipping_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("AbsMaxRule", "clipping_scale", self.clipping_scale)

    def min_max(self, input: Tensor, spec: Numerics) -> MinMax:
        low, high = min_max(input, spec.block_size(input.shape))
        bound = torch.maximum(-low, high)
        if self.clipping_scale != 1:
            bound = bound * self.clipping_scale
        return -bound, bound


@jsonable
@dataclass(frozen=True)
class PowerMeanRule(ScaleRule):
    """[-a, a] with a = `clipping_scale` (mean |x|^p)^(1/p), the mean over the elements that are not zero.

    Zeros, of a ReLU say, tell nothing of the size of the others (AQT, `AbsMeanCalibration`).
    """

    p: float = 1.0
    clipping_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("PowerMeanRule", "p", self.p)
        _check_positive("PowerMeanRule", "clipping_scale", self.clipping_scale)

    def min_max(self, input: Tensor, spec: Numerics) -> MinMax:
        blocks, shape = elements_last(input, spec)
        if not blocks.numel():
            return MinMaxRule().min_max(input, spec)
        magnitude = blocks.float().abs()
        # Powers of the quotient by the largest neither overflow nor vanish.
        largest = magnitude.amax(-1, keepdim=True)
        unit = torch.where(largest > 0, largest, 1.0)
        count = (magnitude != 0).sum(-1).clamp(min=1)
        mean = ((magnitude / unit) ** self.p).sum(-1) / count
        bound = (mean ** (1 / self.p) * unit.squeeze(-1) * self.clipping_scale).reshape(shape)
        return _with_non_finite(-bound, bound, input, spec)


@jsonable
@dataclass(frozen=True)
class AbsMeanRule(ScaleRule):
    """The range for which scale = mean |x| (BitNet b1.58, arXiv 2402.17764, eq. 1-3, with codes in {-1, 0, 1})."""

    joins: ClassVar[Joins | None] = Joins.MEAN

    def min_max(self, input: Tensor, spec: Numerics) -> MinMax:
        blocks, shape = elements_last(input, spec)
        low_code, high_code = spec.code_range
        mean = (
            blocks.float().abs().mean(-1).reshape(shape)
            if blocks.numel()
            else input.new_zeros(shape, dtype=torch.float32)
        )
        if spec.mapping is MappingType.SYMMETRIC:
            low_code, high_code = (low_code - high_code) / 2, (high_code - low_code) / 2
        return mean * low_code, mean * high_code


@jsonable
@dataclass(frozen=True)
class LSQRule(ScaleRule):
    """The range for which scale = 2 mean |x| / sqrt(Q_P), the initial step of LSQ (arXiv 1902.08153, section 2.1).

    Q_P is the number of codes above that of zero. With an asymmetric mapping a block without negative elements uses all
    codes; any other block uses as many below zero as above.
    """

    def min_max(self, input: Tensor, spec: Numerics) -> MinMax:
        block, (low, high) = spec.block_size(input.shape), spec.code_range
        steps = high - low
        bound = lsq_scale(input, block, high - int((low + high + 1) / 2)) * (steps / 2)
        if spec.mapping is not MappingType.ASYMMETRIC:
            return -bound, bound
        unsigned = min_max(input, block)[0] >= 0
        return torch.where(unsigned, 0.0, -bound), torch.where(unsigned, lsq_scale(input, block, steps) * steps, bound)


@jsonable
@dataclass(frozen=True)
class FixedRangeRule(ScaleRule):
    """The fixed range [low, high] for any data, such as [0, 1] for softmax outputs, or a learned clip."""

    joins: ClassVar[Joins | None] = Joins.EXTREMES

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"a fixed range needs low < high, got [{self.low}, {self.high}]")

    def min_max(self, input: Tensor, spec: Numerics) -> MinMax:
        shape = BlockView(input.shape, spec.block_size(input.shape)).scale_shape
        full = torch.full(shape, self.low, dtype=torch.float32, device=input.device)
        return _with_non_finite(full, torch.full_like(full, self.high), input, spec)


@jsonable
@dataclass(frozen=True)
class PercentileRule(ScaleRule):
    """The range without the outermost (1 - p/100) / 2 of the elements on either side, so that outliers clip."""

    percentile: float = 99.9

    def __post_init__(self) -> None:
        if not 0 < self.percentile <= 100:
            raise ValueError(f"percentile must be in (0, 100], got {self.percentile}")

    def min_max(self, input: Tensor, spec: Numerics) -> MinMax:
        blocks, shape = elements_last(input, spec)
        count = blocks.shape[-1]
        if blocks.numel() == 0:
            return MinMaxRule().min_max(input, spec)
        blocks = blocks.float()
        tail = (1 - self.percentile / 100) / 2
        # kthvalue, unlike quantile, has no limit on the number of elements.
        k = min(int(tail * count), (count - 1) // 2)
        low = torch.kthvalue(blocks, k + 1, dim=-1).values
        high = torch.kthvalue(blocks, count - k, dim=-1).values
        return _with_non_finite(low.reshape(shape), high.reshape(shape), input, spec)


@jsonable
@dataclass(frozen=True)
class MSERule(ScaleRule):
    """Shrink [min, max] by the factor in [smallest, 1] that minimizes |x - dequantize(quantize(x))|^2, per block.

    `steps` factors are tried, 1 included, so the result is never worse than that of `MinMaxRule`. The least squared
    error is the best SQNR.
    """

    steps: int = 41
    smallest: float = 0.5

    def __post_init__(self) -> None:
        if self.steps < 2 or not 0 < self.smallest < 1:
            raise ValueError(f"needs steps >= 2 and 0 < smallest < 1, got {self.steps} and {self.smallest}")

    def min_max(self, input: Tensor, spec: Numerics) -> MinMax:
        low, high = MinMaxRule().min_max(input, spec)
        # The search compares errors, so it must not round stochastically.
        spec = spec.to_nearest()
        best, best_error = torch.ones_like(low), torch.full_like(low, float("inf"))
        for step in range(self.steps):
            factor = 1 - (1 - self.smallest) * step / (self.steps - 1)
            scale, zero_point = spec.choose_qparams_from_range(low * factor, high * factor, input.dtype)
            codes = spec.quantize(input, scale, zero_point)
            difference = spec.dequantize(codes, scale, zero_point) - input.float()
            blocks, shape = elements_last(difference, spec)
            error = blocks.square().sum(-1).reshape(shape)
            best = torch.where(error < best_error, torch.full_like(best, factor), best)
            best_error = torch.minimum(error, best_error)
        return low * best, high * best


def _check_positive(rule: str, name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{rule}: {name} is positive, got {value}")


def _with_non_finite(low: Tensor, high: Tensor, input: Tensor, spec: Numerics) -> MinMax:
    """`low` and `high`, with NaN for blocks with a NaN or an infinity, which a rule that skips elements may miss."""
    least, most = min_max(input, spec.block_size(input.shape))
    return with_non_finite(low, least), with_non_finite(high, most)


def elements_last(input: Tensor, spec: Numerics) -> tuple[Tensor, tuple[int, ...]]:
    """`input` in the shape (blocks, elements of a block), and the shape of the scale."""
    view = BlockView(input.shape, spec.block_size(input.shape))
    x = view.split(input)
    kept = [d for d in range(x.dim()) if d not in view.dims]
    count = math.prod(view.scale_shape)
    x = x.permute(*kept, *view.dims)
    return x.reshape(count, -1) if x.numel() else x.reshape(count, 0), view.scale_shape
