"""Layers that work as one: chains of convolutions that hand codes to each other, products of one input, and what a
decoder does around them."""

from .decoder_layers import DecoderReport, ProjectionReport, fuse_decoder, fuse_projections
from .fused_model import FusedModel, FusionReport, fuse_convolutions

__all__ = [
    "DecoderReport", "FusedModel", "FusionReport", "ProjectionReport", "fuse_convolutions", "fuse_decoder",
    "fuse_projections",
]  # fmt: skip
