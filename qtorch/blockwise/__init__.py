"""Calibration in the order of the model, one block at a time."""

from . import fingerprint
from .estimate import estimate
from .in_order import Wanted, quantize_in_order
from .progress import Progress, Resumable

__all__ = ["Progress", "Resumable", "Wanted", "estimate", "fingerprint", "quantize_in_order"]
