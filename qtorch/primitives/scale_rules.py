"""Scale rules: choose the range [min, max] that the codes of a block should cover from its elements.

A rule implements `min_max(input, spec)`, which returns two fp32 tensors in the shape of the scale;
`choose_qparams_affine_with_min_max` turns them into scale and zero point. A new rule is a frozen dataclass.
"""

from dataclasses import replace
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from .affine import MappingType, ZeroPointDomain, with_non_finite
from .fake_quant import lsq_scale
from .granularity import BlockView, PerGroup, PerRow
from .jsonable import jsonable
from .qparams import Numerics, min_max

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
class MinMaxRule(ScaleRule):
    """The whole range of the block; with a symmetric mapping, that is [-absmax, absmax]."""

    joins: ClassVar[Joins | None] = Joins.EXTREMES

    def min_max(self, input: Tensor, spec: Numerics) -> MinMax:
        return min_max(input, spec.block_size(input.shape))


@jsonable
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
class AbsMeanRule(ScaleRule):
    """The range for which scale = mean |x| (BitNet b1.58, arXiv 2402.17764, eq. 1-3, with codes in {-1, 0, 1})."""

    joins: ClassVar[Joins | None] = Joins.MEAN

    def min_max(self, input: Tensor, spec: Numerics) -> MinMax:
        blocks, shape = elements_last(input, spec)
        low_code, high_code = spec.code_range
        empty = not blocks.numel()
        mean = input.new_zeros(shape, dtype=torch.float32) if empty else blocks.float().abs().mean(-1).reshape(shape)
        if spec.mapping is MappingType.SYMMETRIC:
            low_code, high_code = (low_code - high_code) / 2, (high_code - low_code) / 2
        return mean * low_code, mean * high_code


@jsonable
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
    return view.as_rows(view.split(input)), view.scale_shape


# HQQ: choose the range of a block by half-quadratic optimization, from the weights alone.
# With the residual r = x - dequantize(quantize(x)), the rule minimizes over the scale and the zero point
#
#     mean |r|^p                                                         over the block
#
# It introduces e, the part of the residual that is attributed to outliers, and alternates
#
#     e              = shrink_p(r, beta) = sign(r) * max(|r| - |r|^(p - 1) / beta, 0)
#     (scale, zero)  = least squares of x - e on the codes               beta grows by kappa
#
# with r and e in steps of the min-max scale.
#
# Source: H. Badri, A. Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023. The paper updates
# only the zero point, to the mean of codes - (x - e) / scale; here the scale is updated too, which gains more.

CHUNK = 2**20
"""Number of elements searched at a time, at least one block, to limit the memory of the search."""


@jsonable
class HQQRule(ScaleRule):
    """The range with the least mean |x - dequantize(quantize(x))|^p per block, by half-quadratic optimization.

    The search starts at [min, max] times the best of `starts` factors from 1 down to `smallest`. Every iterate is
    evaluated as it would be stored (scale and zero point rounded and clipped), and the best one is kept, so the result
    is never worse than that of `MinMaxRule`. The search is deterministic. Double quantization (`scale_spec`) rounds the
    scales after the search, since it couples blocks.

    The default is p = 2, least squares: in whole models a smaller p mostly clips too much. The paper uses p < 1.

    Args:
        p: power of the error, in (0, 2]; 2 maximizes the SQNR, a smaller p lets outliers clip.
        beta: weight that ties e to the residual in the first iteration; a greater beta attributes more to outliers.
        kappa: factor by which beta grows with each iteration.
        iterations: updates of scale and zero point.
        starts: number of factors tried; 1 is [min, max] alone.
        smallest: the smallest factor, in (0, 1).

    Raises:
        ValueError: a number is out of its range, or, when used, the codes are not integers.
    """

    p: float = 2.0
    beta: float = 1.0
    kappa: float = 1.01
    iterations: int = 20
    starts: int = 8
    smallest: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.p <= 2:
            raise ValueError(f"p must be in (0, 2], got {self.p}")
        if self.beta < 1 or self.kappa < 1:
            raise ValueError(f"needs beta >= 1 and kappa >= 1, got {self.beta} and {self.kappa}")
        if self.iterations < 0 or self.starts < 1 or not 0 < self.smallest < 1:
            found = f"{self.iterations}, {self.starts} and {self.smallest}"
            raise ValueError(f"needs iterations >= 0, starts >= 1 and 0 < smallest < 1, got {found}")

    def min_max(self, input: Tensor, spec: Numerics) -> MinMax:
        if spec.dtype.is_floating_point:
            raise ValueError(f"HQQRule: takes integer codes, got {spec.dtype.name}")
        if input.numel() == 0:
            return MinMaxRule().min_max(input, spec)
        blocks, shape = elements_last(input, spec)
        # Each block becomes a row; groups stay groups, since the granularity decides the default dtype of the scale.
        row = PerGroup(-1) if isinstance(spec.granularity, PerGroup) and spec.scale_spec is None else PerRow()
        # The search compares errors, so it must not round stochastically.
        spec = replace(spec.with_granularity(row).to_nearest(), scale_spec=None)
        chunks = blocks.split(max(1, CHUNK // blocks.shape[1]))
        low, high = zip(*(self._search(chunk, spec) for chunk in chunks), strict=True)
        return torch.cat(low).reshape(shape), torch.cat(high).reshape(shape)

    def _search(self, rows: Tensor, spec: Numerics) -> MinMax:
        """Ranges (rows, 1) of rows (rows, elements)."""
        low, high = MinMaxRule().min_max(rows, spec)
        # Errors are in steps of the first range, so that they cannot overflow.
        x, step = rows.float(), spec.choose_qparams_from_range(low, high, rows.dtype)[0].float()
        best_low, best_high, least = low, high, torch.full_like(low, float("inf"))

        def evaluate(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
            """Scale, zero point, codes and error in steps; the range is kept where it is the best so far."""
            nonlocal best_low, best_high, least
            scale, zero_point = spec.choose_qparams_from_range(low, high, rows.dtype)
            codes = spec.quantize(x, scale, zero_point)
            error = (x - spec.dequantize(codes, scale, zero_point)) / step
            loss = error.abs().pow(self.p).mean(1, keepdim=True)
            better = loss < least
            best_low, best_high = torch.where(better, low, best_low), torch.where(better, high, best_high)
            least = torch.where(better, loss, least)
            return scale.float(), zero_point, codes.float(), error

        for index in range(self.starts):
            factor = 1 - (1 - self.smallest) * index / max(self.starts - 1, 1)
            evaluate(low * factor, high * factor)
        low, high = best_low, best_high
        beta = self.beta
        for _ in range(self.iterations):
            scale, zero_point, codes, error = evaluate(low, high)
            rest = error - shrink(error, self.p, beta)
            low, high = _fit(spec, scale, zero_point, codes, rest * (step / scale))
            beta *= self.kappa
        evaluate(low, high)
        return best_low, best_high


def shrink(x: Tensor, p: float, beta: float) -> Tensor:
    """sign(x) * max(|x| - |x|^(p - 1) / beta, 0): the generalized soft threshold, the ordinary one for p = 1."""
    size = x.abs()
    return x.sign() * (size - size.clamp(min=torch.finfo(x.dtype).tiny).pow(p - 1) / beta).clamp(min=0)


def _fit(spec: Numerics, scale: Tensor, zero_point: Tensor | None, codes: Tensor, error: Tensor) -> MinMax:
    """Ranges (rows, 1) whose scale and zero point have the least squared error for fixed `codes` (rows, elements), made
    with `scale` and `zero_point`; `error` is the target minus what they stand for, in units of `scale`."""
    low_code, high_code = spec.code_range
    domain = spec.zero_point_domain
    zero: Tensor | float = 0.0
    if zero_point is not None:
        zero = domain.zero_point_code(low_code, high_code) if domain.adds_zero_point else zero_point.float()
    target = codes - zero + error
    if spec.mapping is MappingType.ASYMMETRIC:
        mean_code, mean = codes.mean(1, keepdim=True), target.mean(1, keepdim=True)
        slope = _slope(codes - mean_code, target - mean)
        if domain.adds_zero_point:
            assert zero_point is not None
            middle = zero_point.float() + scale * (mean + slope * (zero - mean_code))
            return middle + scale * slope * (low_code - zero), middle + scale * slope * (high_code - zero)
        zero = mean_code - mean / slope
        zero = (zero if domain is ZeroPointDomain.FRACTIONAL else torch.round(zero)).clamp(low_code, high_code)
    slope = _slope(codes - zero, target)
    if spec.mapping is MappingType.SYMMETRIC:
        bound = scale * slope * ((high_code - low_code) / 2)
        return -bound, bound
    if spec.mapping is MappingType.SYMMETRIC_SIGNED:
        end = scale * slope * (low_code - zero)
        return end.clamp(max=0), end.clamp(min=0)
    return scale * slope * (low_code - zero), scale * slope * (high_code - zero)


def _slope(x: Tensor, y: Tensor) -> Tensor:
    """Least squares of y on x through the origin, per row; 1 where x is zero or the slope is not positive."""
    slope = (x * y).sum(1, keepdim=True) / x.square().sum(1, keepdim=True)
    return torch.where(slope > 0, slope, 1.0)
