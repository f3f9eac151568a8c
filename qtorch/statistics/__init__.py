"""Statistics of the inputs of weights that recipes can request, and their collection over batches of data."""

from .base import Missed, Statistic, Statistics
from .batches import Data, run_batches
from .collect import collect
from .histogram import Histogram
from .of_inputs import Inputs, MeanSquare, Moments, SecondMoment
from .ranges import BatchMagnitudes, BatchRanges, Range
from .uses import Key, Use, UseRecorder, without_padding

__all__ = [
    "BatchMagnitudes",
    "BatchRanges",
    "Data",
    "Histogram",
    "Inputs",
    "Key",
    "MeanSquare",
    "Missed",
    "Moments",
    "Range",
    "SecondMoment",
    "Statistic",
    "Statistics",
    "Use",
    "UseRecorder",
    "collect",
    "run_batches",
    "without_padding",
]
