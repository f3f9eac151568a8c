"""Observers that search for the range that scores best, among those that shrink the extremes of what was seen."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ...primitives import MappingType, PerRow, QuantSpec
from ..statistics import Histogram, Statistic
from .base import MinMax, Observer, register_observer

Score = Callable[[Tensor, Tensor], Tensor]
"""(lows (C,), highs (C,)) -> (C,), the smallest is best."""

ROUNDS = 2
"""In which the two ends of an asymmetric range are moved, one after the other."""


@dataclass(frozen=True, repr=False)
class RangeSearch(Observer):
    """Base class of observers that try `steps` factors, 2 or more, from 1 to `smallest`, above 0 and below 1."""

    statistic: ClassVar[type[Statistic]] = Histogram

    steps: int = 100
    smallest: float = 0.1

    def __post_init__(self) -> None:
        if self.steps < 2 or not 0 < self.smallest < 1:
            raise ValueError(f"{self.name}: needs steps >= 2 and 0 < smallest < 1, got {self.steps}, {self.smallest}")


def best_range(low: Tensor, high: Tensor, spec: QuantSpec, steps: int, smallest: float, score: Score) -> MinMax:
    """The best of the ranges f low, f high with `steps` factors f from 1 to `smallest`; the widest of equal ones. With
    an asymmetric mapping, whose ends are free, each end is then moved alone by such factors."""
    factors = torch.linspace(1, smallest, steps, device=low.device, dtype=torch.float32)
    low, high = low.clamp(max=0), high.clamp(min=0)
    best = factors[score(low * factors, high * factors).argmin()]
    if spec.mapping is not MappingType.ASYMMETRIC:
        return low * best, high * best
    of_low = of_high = best
    for _ in range(ROUNDS):
        of_low = factors[score(low * factors, (high * of_high).expand(steps)).argmin()]
        of_high = factors[score((low * of_low).expand(steps), high * factors).argmin()]
    return low * of_low, high * of_high


def quantized(values: Tensor, lows: Tensor, highs: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """(codes, what they stand for in fp32), both (C, V), of `values` (V,) with each of C ranges."""
    spec = replace(spec.to_nearest(), granularity=PerRow())
    scale, zero_point = spec.choose_qparams_from_range(lows.unsqueeze(1), highs.unsqueeze(1))
    codes = spec.quantize(values.expand(len(lows), -1), scale, zero_point)
    return codes, spec.dequantize(codes, scale, zero_point)


@register_observer("percentile")
class PercentileObserver(Observer):
    """The range without the outermost (1 - p/100) / 2 of the elements on either side, as `PercentileRule`; its ends are
    the outer edges of bins of the histogram.

    Args:
        percentile: p, above 0 and at most 100.

    Raises:
        ValueError: it is out of range.
    """

    statistic: ClassVar[type[Statistic]] = Histogram

    percentile: float = 99.99

    def __post_init__(self) -> None:
        if not 0 < self.percentile <= 100:
            raise ValueError(f"percentile: percentile is above 0 and at most 100, got {self.percentile}")

    def range(self, seen: Histogram, spec: QuantSpec) -> MinMax:
        values, counts = seen.occupied()
        count = int(counts.double().sum())
        left_out = min(int((1 - self.percentile / 100) / 2 * count), (count - 1) // 2)

        def bin_of(counts: Tensor) -> Tensor:
            """The bin of the first element that is not left out."""
            total = counts.double().cumsum(0)
            return torch.searchsorted(total, torch.full_like(total[:1], left_out), right=True)[0]

        low = values[bin_of(counts)] - seen.width / 2
        high = values.flip(0)[bin_of(counts.flip(0))] + seen.width / 2
        return torch.clamp(low, min=seen.low), torch.clamp(high, max=seen.high)


@register_observer("mse")
class MSEObserver(RangeSearch):
    """The range, among those that shrink the extremes by `steps` factors from 1 to `smallest`, with the least

        sum over bins of count * (x - dequantize(quantize(x)))^2

    by the codes of the spec itself; the best SQNR of the input. The extremes are among them.
    """

    def range(self, seen: Histogram, spec: QuantSpec) -> MinMax:
        values, counts = seen.occupied()
        weights = (counts / counts.sum()).double()

        def error(lows: Tensor, highs: Tensor) -> Tensor:
            return (quantized(values, lows, highs, spec)[1] - values).double().square() @ weights

        return best_range(seen.low, seen.high, spec, self.steps, self.smallest, error)


@register_observer("entropy")
class EntropyObserver(RangeSearch):
    """The range, among those that shrink the extremes by `steps` factors from 1 to `smallest`, with the least
    Kullback-Leibler divergence KL(P || Q) over bins.

    P is the histogram inside the range, with what lies outside added to the outermost bins that are not empty. Q is the
    histogram inside the range as the codes know it: bins of one code share their counts equally; empty bins stay empty.
    As in TensorRT (Migacz, "8-bit inference with TensorRT", GTC 2017), with the codes of the spec itself in place of
    equal parts of the range. With a symmetric mapping, of magnitudes. The bins next to zero, which hold the zeros,
    count as their neighbours do.

    It sees frequencies and not how far a value moves, so it clips rare large values that may matter: compare with
    `mse` before you use it.
    """

    steps: int = 128
    smallest: float = 0.0625

    def range(self, seen: Histogram, spec: QuantSpec) -> MinMax:
        symmetric = spec.mapping is not MappingType.ASYMMETRIC
        values, counts = _magnitudes(seen) if symmetric else seen.occupied()
        near = values.abs() < seen.width
        further = (values.abs() < 2 * seen.width) & ~near
        if bool(further.any()):
            # Exact zeros, of a ReLU say, would outweigh all else, and every range represents them.
            counts = torch.where(near, counts[further].mean(), counts)

        def divergence(lows: Tensor, highs: Tensor) -> Tensor:
            codes = quantized(values, lows, highs, spec)[0]
            return torch.stack([_divergence(values, counts, *each) for each in zip(lows, highs, codes, strict=True)])

        low, high = seen.low, seen.high
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        return best_range(low, high, spec, self.steps, self.smallest, divergence)


def _magnitudes(seen: Histogram) -> tuple[Tensor, Tensor]:
    """(values, counts) of |x|, in rising order."""
    values, counts = seen.occupied()
    # Those of bins and of their mirror images are equal, but for the outermost ones, which are moved into the range.
    found, index = (values.abs() / seen.width).floor().unique(return_inverse=True)
    summed = torch.zeros_like(found).index_add_(0, index, counts)
    return torch.clamp((found + 0.5) * seen.width, max=torch.maximum(-seen.low, seen.high)), summed


def _divergence(values: Tensor, counts: Tensor, low: Tensor, high: Tensor, codes: Tensor) -> Tensor:
    """KL(P || Q) for one range."""
    inside = ((values >= low) & (values <= high)).nonzero().squeeze(1)
    if not len(inside):
        return torch.tensor(torch.inf, device=values.device, dtype=torch.float32)
    first, last = int(inside[0]), int(inside[-1]) + 1
    own = counts[first:last].double()
    p = own.clone()
    p[0] += counts[:first].double().sum()
    p[-1] += counts[last:].double().sum()
    _, of_code, sizes = codes[first:last].float().unique(return_inverse=True, return_counts=True)
    q = torch.zeros(len(sizes), dtype=own.dtype, device=own.device).index_add_(0, of_code, own) / sizes
    p, q = p / p.sum(), q[of_code]
    return (p * (p / (q / q.sum())).log()).sum()
