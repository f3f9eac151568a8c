"""mse: the range with the least squared error of the inputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...primitives import QuantSpec
from ...statistics import Histogram
from .base import MinMax, register_observer
from .search import RangeSearch, best_range, quantized


@register_observer("mse")
@dataclass(frozen=True, repr=False)
class MSEObserver(RangeSearch):
    """The range, among shrunken extremes, with the least

        sum over bins of count * (x - dequantize(quantize(x)))^2

    by the codes of the spec itself; the best SQNR of the input. The extremes are among them.

    Args:
        steps: number of factors, 2 or more.
        smallest: the last of them, above 0 and below 1.

    Raises:
        ValueError: an argument is out of range.
    """

    def range(self, seen: Histogram, spec: QuantSpec) -> MinMax:
        values, counts = seen.occupied()
        weights = (counts / counts.sum()).double()

        def error(lows: Tensor, highs: Tensor) -> Tensor:
            reals = quantized(values, lows, highs, spec)[1]
            return (reals - values).double().square() @ weights

        return best_range(seen.low, seen.high, spec, self.steps, self.smallest, error)


mse = MSEObserver
