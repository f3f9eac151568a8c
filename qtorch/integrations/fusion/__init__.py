"""Layers that work as one: chains of convolutions that hand codes to each other, and products of one input."""

from .fused_model import FusedModel, FusionReport, fuse_convolutions
from .projections import ProjectionReport, fuse_projections

__all__ = ["FusedModel", "FusionReport", "ProjectionReport", "fuse_convolutions", "fuse_projections"]
