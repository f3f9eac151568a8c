"""Calibration in the order of the model, one block at a time."""

from .estimate import estimate
from .in_order import BlockLearner, BlockRun, InOrder, of_weight
from .progress import Progress, Resumable, fingerprint, fingerprint_of_data, fingerprint_of_weights

__all__ = [
    "BlockLearner", "BlockRun", "InOrder", "Progress", "Resumable", "estimate", "fingerprint", "fingerprint_of_data",
    "fingerprint_of_weights", "of_weight",
]  # fmt: skip
