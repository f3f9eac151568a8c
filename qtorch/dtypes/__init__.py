"""Quantized tensors: `AffineQuantizedTensor`, its layouts, and the operations on it."""

from ..primitives.layouts import (
    BlockSparseLayout, Layout, PackedLayout, PlainLayout, SemiSparseLayout, TensorCoreTiledLayout, register_layout,
)  # fmt: skip
from . import conv, distributed, embedding, experts, joining, ops, parameter, products  # noqa: F401 (they register what they serve)
from .affine_tensor import AffineQuantizedTensor
from .base import QuantizedTensor, quantized_type
from .codebook_tensor import LUTQuantizedTensor, NF4Tensor, linear_nf4, to_nf4
from .conv import ConvWeight
from .factories import (
    UintxTensor, deregister_aqt_quantized_linear_dispatch, register_aqt_quantized_linear_dispatch,
    to_affine_quantized_floatx, to_affine_quantized_floatx_static, to_affine_quantized_fpx, to_affine_quantized_intx,
    to_affine_quantized_intx_static, to_linear_activation_quantized, to_uintx,
)  # fmt: skip
from .low_rank_weight import LowRankWeight
from .matrix_weight import MatrixWeight
from .transposed_weight import PaddedWeight, TransposedWeight

__all__ = [
    "AffineQuantizedTensor", "BlockSparseLayout", "ConvWeight", "LUTQuantizedTensor", "Layout", "LowRankWeight",
    "MatrixWeight", "NF4Tensor", "PackedLayout", "PaddedWeight", "PlainLayout", "QuantizedTensor", "SemiSparseLayout",
    "TensorCoreTiledLayout", "TransposedWeight", "UintxTensor", "deregister_aqt_quantized_linear_dispatch",
    "linear_nf4", "quantized_type", "register_aqt_quantized_linear_dispatch", "register_layout",
    "to_affine_quantized_floatx", "to_affine_quantized_floatx_static", "to_affine_quantized_fpx",
    "to_affine_quantized_intx", "to_affine_quantized_intx_static", "to_linear_activation_quantized", "to_nf4",
    "to_uintx",
]  # fmt: skip
