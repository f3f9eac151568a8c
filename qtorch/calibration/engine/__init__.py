"""Calibration in the order of the model, one block at a time."""

from . import fingerprint
from .estimate import estimate
from .in_order import BlockLearner, BlockRun, InOrder, of_weight
from .progress import Progress, Resumable

__all__ = ["BlockLearner", "BlockRun", "InOrder", "Progress", "Resumable", "estimate", "fingerprint", "of_weight"]
