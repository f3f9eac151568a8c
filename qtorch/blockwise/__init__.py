"""Calibration in the order of the model, one block at a time."""

from . import fingerprint
from .block_run import BlockLearner, BlockRun
from .estimate import estimate
from .in_order import Wanted, of_weight, quantize_in_order
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
