"""Calibration in the order in which a model runs, one block at a time."""

from .in_order import Wanted, quantize_in_order

__all__ = ["Wanted", "quantize_in_order"]
