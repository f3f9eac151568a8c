"""Export of quantized models to other packages: operators of torch alone, ONNX files."""

from .onnx import onnx, onnx_translations
from .portable_model import portable

__all__ = ["onnx", "onnx_translations", "portable"]
