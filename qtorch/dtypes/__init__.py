"""Quantized tensors: `AffineQuantizedTensor`, its layouts, and the operations on it."""

from ..layouts import (
    BlockSparseLayout,
    Layout,
    PackedLayout,
    PlainLayout,
    SemiSparseLayout,
    TensorCoreTiledLayout,
    register_layout,
)
from . import (
    collectives,
    concatenation,
    conv,
    einsum,
    embedding,
    expert_matrices,
    functions,
    ops,
    parameter,
    raw_memory,
    shards,
    traced_views,
    views,
)
from .affine import AffineQuantizedTensor
from .base import QuantizedTensor, quantized_type
from .codebook import LUTQuantizedTensor, NF4Tensor, linear_nf4, to_nf4
from .conv_weight import ConvWeight
from .factories import (
    to_affine_quantized_floatx,
    to_affine_quantized_floatx_static,
    to_affine_quantized_fpx,
    to_affine_quantized_intx,
    to_affine_quantized_intx_static,
    to_linear_activation_quantized,
)
from .matrix_weight import MatrixWeight
from .outside_dispatch import deregister_aqt_quantized_linear_dispatch, register_aqt_quantized_linear_dispatch
from .transposed_weight import PaddedWeight, TransposedWeight
from .uintx import UintxTensor, to_uintx

__all__ = [
    "AffineQuantizedTensor",
    "BlockSparseLayout",
    "ConvWeight",
    "LUTQuantizedTensor",
    "Layout",
    "MatrixWeight",
    "NF4Tensor",
    "PackedLayout",
    "PaddedWeight",
    "PlainLayout",
    "QuantizedTensor",
    "SemiSparseLayout",
    "TensorCoreTiledLayout",
    "TransposedWeight",
    "UintxTensor",
    "collectives",
    "concatenation",
    "conv",
    "deregister_aqt_quantized_linear_dispatch",
    "einsum",
    "embedding",
    "expert_matrices",
    "functions",
    "linear_nf4",
    "ops",
    "parameter",
    "quantized_type",
    "raw_memory",
    "register_aqt_quantized_linear_dispatch",
    "register_layout",
    "shards",
    "to_affine_quantized_floatx",
    "to_affine_quantized_floatx_static",
    "to_affine_quantized_fpx",
    "to_affine_quantized_intx",
    "to_affine_quantized_intx_static",
    "to_linear_activation_quantized",
    "to_nf4",
    "to_uintx",
    "traced_views",
    "views",
]
