"""qtorch: quantize PyTorch models for inference, and train them in low precision.

from qtorch import quantize_, int8_weight_only
quantize_(model, int8_weight_only())
"""

from .checkpoint import load_quantized, save_quantized
from .config import config
from .dtypes import AffineQuantizedTensor, PlainLayout
from .explain import explain
from .primitives import (
    LinearSpec,
    MappingType,
    PerAxis,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
    QuantSpec,
    ZeroPointDomain,
    compute_error,
)
from .quantize_api import dequantize_, quantize_
from .recipes import (
    int4_weight_only,
    int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
)
from .report import QuantizeReport

__version__ = "0.1.0"

__all__ = [
    "AffineQuantizedTensor",
    "LinearSpec",
    "MappingType",
    "PerAxis",
    "PerBlock",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "PerToken",
    "PlainLayout",
    "QuantSpec",
    "QuantizeReport",
    "ZeroPointDomain",
    "compute_error",
    "config",
    "dequantize_",
    "explain",
    "int4_weight_only",
    "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_int8_weight",
    "int8_weight_only",
    "load_quantized",
    "quantize_",
    "save_quantized",
]
