"""Chains of convolutions that hand codes to each other: `fuse_convolutions`."""

from .fused_model import FusedModel, FusionReport, fuse_convolutions

__all__ = ["FusedModel", "FusionReport", "fuse_convolutions"]
