"""Calibration in the order in which a model runs, one block at a time."""

from .block_run import BlockLearner, BlockRun
from .in_order import Wanted, quantize_in_order

__all__ = ["BlockLearner", "BlockRun", "Wanted", "quantize_in_order"]
