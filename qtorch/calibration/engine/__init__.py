"""Calibration in the order of the model, one block at a time."""

from . import fingerprint
from .estimate import estimate
from .in_order import BlockLearner, BlockRun, Wanted, of_weight, quantize_in_order
from .progress import Progress, Resumable

__all__ = [
    "BlockLearner",
    "BlockRun",
    "Progress",
    "Resumable",
    "Wanted",
    "estimate",
    "fingerprint",
    "of_weight",
    "quantize_in_order",
]
