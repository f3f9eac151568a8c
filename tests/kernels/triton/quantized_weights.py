"""Quantized weights and activations for the tests of products, and how near to the reference a product has to be."""

import torch

from qtorch import AffineQuantizedTensor, LinearSpec, MappingType, PackedLayout, PerRow, PlainLayout, QuantSpec

ASYMMETRIC = MappingType.ASYMMETRIC
TOKEN = QuantSpec("int8", PerRow(), quant_min=-127)
ASYMMETRIC_TOKEN = QuantSpec("int8", PerRow(), ASYMMETRIC)

LEAST = {torch.float32: 95, torch.float16: 50, torch.bfloat16: 38}
"""SQNR in dB of a product in floating point."""


def weight_of(spec, shape, device, activation=None, dtype=torch.float32):
    """A random weight, packed where that makes it smaller."""
    layout = PlainLayout() if spec.dtype.bits == 8 else PackedLayout()
    linear = LinearSpec(spec, activation, layout=layout)
    return AffineQuantizedTensor.from_float(torch.randn(shape).to(dtype), linear).to(device)
