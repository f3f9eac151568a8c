"""mse: the range with the least squared error of the inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...primitives import QuantSpec
from ...statistics import Histogram, Statistic
from .base import MinMax, Observer, register_observer
from .search import best_range, quantized


@register_observer("mse")
@dataclass(frozen=True, repr=False)
class MSEObserver(Observer):
    """The range, among shrunken extremes, with the least

        sum over bins of count * (x - dequantize(quantize(x)))^2

    by the codes of the spec itself; the best SQNR of the input. The extremes are among them.

    Args:
        steps: number of factors, 2 or more.
        smallest: the last of them, above 0 and below 1.

    Raises:
        ValueError: an argument is out of range.
    """

    statistic: ClassVar[type[Statistic]] = Histogram

    steps: int = 100
    smallest: float = 0.1

    def __post_init__(self) -> None:
        if self.steps < 2 or not 0 < self.smallest < 1:
            raise ValueError(f"mse: needs steps >= 2 and 0 < smallest < 1, got {self.steps} and {self.smallest}")

    def range(self, seen: Histogram, spec: QuantSpec) -> MinMax:
        values, counts = seen.occupied()
        weights = (counts / counts.sum()).double()

        def error(lows: Tensor, highs: Tensor) -> Tensor:
            reals = quantized(values, lows, highs, spec)[1]
            return (reals - values).double().square() @ weights

        return best_range(seen.low, seen.high, spec, self.steps, self.smallest, error)


mse = MSEObserver
