"""entropy: the range whose codes keep most of the distribution of the inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...primitives import MappingType, QuantSpec
from ...statistics import Histogram
from .base import MinMax, register_observer
from .search import RangeSearch, best_range, quantized


@register_observer("entropy")
@dataclass(frozen=True, repr=False)
class EntropyObserver(RangeSearch):
    """The range, among shrunken extremes, with the least Kullback-Leibler divergence KL(P || Q) over bins.

    P is the histogram inside the range, with what lies outside added to the outermost bins that are not empty. Q is the
    histogram inside the range as the codes know it: bins of one code share their counts equally; empty bins stay empty.
    As in TensorRT (Migacz, "8-bit inference with TensorRT", GTC 2017), with the codes of the spec itself in place of
    equal parts of the range. With a symmetric mapping, of magnitudes. The bins next to zero, which hold the zeros,
    count as their neighbours do.

    It sees frequencies and not how far a value moves, so it clips rare large values that may matter: compare with
    `mse` before you use it.

    Args:
        steps: number of factors, 2 or more.
        smallest: the last of them, above 0 and below 1.

    Raises:
        ValueError: an argument is out of range.
    """

    steps: int = 128
    smallest: float = 0.0625

    def range(self, seen: Histogram, spec: QuantSpec) -> MinMax:
        values, counts = magnitudes(seen) if spec.mapping is not MappingType.ASYMMETRIC else seen.occupied()
        counts = without_zeros(values, counts, seen.width)

        def divergence(lows: Tensor, highs: Tensor) -> Tensor:
            codes = quantized(values, lows, highs, spec)[0]
            return torch.stack([_divergence(values, counts, *each) for each in zip(lows, highs, codes, strict=True)])

        low, high = seen.low, seen.high
        if spec.mapping is not MappingType.ASYMMETRIC:
            high = torch.maximum(-low, high)
            low = -high
        return best_range(low, high, spec, self.steps, self.smallest, divergence)


def magnitudes(seen: Histogram) -> tuple[Tensor, Tensor]:
    """(values, counts) of |x|, in rising order."""
    values, counts = seen.occupied()
    # Those of bins and of their mirror images are equal, but for the outermost ones, which are moved into the range.
    bins = (values.abs() / seen.width).floor()
    found, index = bins.unique(return_inverse=True)
    summed = torch.zeros_like(found).index_add_(0, index, counts)
    largest = torch.maximum(-seen.low, seen.high)
    return torch.clamp((found + 0.5) * seen.width, max=largest), summed


def without_zeros(values: Tensor, counts: Tensor, width: float) -> Tensor:
    """`counts`, those of the bins next to zero replaced by the ones further out: exact zeros, of a ReLU say, would
    outweigh all else, and every range represents them."""
    near = values.abs() < width
    further = (values.abs() < 2 * width) & ~near
    if not bool(further.any()):
        return counts
    return torch.where(near, counts[further].mean(), counts)


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


entropy = EntropyObserver
