"""Export of quantized models to other packages: operators of torch alone, ONNX files."""

from .onnx_file import onnx
from .onnx_translations import onnx_translations
from .portable import portable

__all__ = ["onnx", "onnx_translations", "portable"]
