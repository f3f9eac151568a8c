"""Quantized tensors: `AffineQuantizedTensor`, its layouts, and the operations on it."""

from . import ops, views
from .affine_quantized_tensor import AffineQuantizedTensor
from .base import QuantizedTensor
from .factories import (
    to_affine_quantized_floatx,
    to_affine_quantized_intx,
    to_affine_quantized_intx_static,
    to_linear_activation_quantized,
)
from .functions import deregister_aqt_quantized_linear_dispatch, register_aqt_quantized_linear_dispatch
from .layouts import Layout, PlainLayout, register_layout

__all__ = [
    "AffineQuantizedTensor",
    "Layout",
    "PlainLayout",
    "QuantizedTensor",
    "deregister_aqt_quantized_linear_dispatch",
    "ops",
    "register_aqt_quantized_linear_dispatch",
    "register_layout",
    "to_affine_quantized_floatx",
    "to_affine_quantized_intx",
    "to_affine_quantized_intx_static",
    "to_linear_activation_quantized",
    "views",
]
