"""Chains of convolutions that hand codes to each other: `fuse_convolutions`."""

from .fused_model import FusedModel, fuse_convolutions
from .plan import FusionReport

__all__ = ["FusedModel", "FusionReport", "fuse_convolutions"]
