"""Statistics of the inputs of weights that recipes can request, and their collection over batches of data."""

from .base import Statistic, Statistics
from .batches import run_batches
from .collect import collect
from .of_inputs import Inputs, MeanSquare, Range, SecondMoment

__all__ = ["Inputs", "MeanSquare", "Range", "SecondMoment", "Statistic", "Statistics", "collect", "run_batches"]
