"""qtorch: quantize PyTorch models for inference, and train them in low precision.

from qtorch import quantize_, int8_weight_only
quantize_(model, int8_weight_only())
"""

from .cli import answer_without_torch

answer_without_torch()

from .supported_versions import check_version as _check_version

_check_version("torch")

from . import calibration, formats, integrations, recipes, training  # noqa: F401 (they register what they hold)
from . import compat as compat
from . import export as export
from . import kv_cache as kv_cache
from .allocation import allocate
from .checkpoint import load_quantized, save_quantized
from .config import config
from .dtypes import (
    AffineQuantizedTensor,
    BlockSparseLayout,
    LUTQuantizedTensor,
    PackedLayout,
    PlainLayout,
    SemiSparseLayout,
    TensorCoreTiledLayout,
)
from .explain import explain
from .find_uses import find_uses
from .formats.compressed_tensors import recipes_for_vllm
from .fusion import fuse_convolutions
from .integrations import watch_imports as _watch_imports
from .kernels import calibrate_cpu
from .model_size import get_model_size_in_bytes
from .primitives import (
    CodebookSpec,
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
from .quantize_checkpoint import convert_checkpoint, quantize_checkpoint
from .recipes import *  # noqa: F403 (every recipe, by its name)
from .report import QuantizeReport
from .weight_kinds import register_weight_kind

globals().update({name: getattr(calibration, name) for name in calibration.RECIPE_NAMES})
globals().update({name: getattr(training, name) for name in training.RECIPE_NAMES})

_watch_imports()

__version__ = "0.1.0"

__all__ = [
    "AffineQuantizedTensor",
    "BlockSparseLayout",
    "CodebookSpec",
    "LUTQuantizedTensor",
    "LinearSpec",
    "MappingType",
    "PerAxis",
    "PerBlock",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "PerToken",
    "PackedLayout",
    "PlainLayout",
    "QuantSpec",
    "QuantizeReport",
    "SemiSparseLayout",
    "TensorCoreTiledLayout",
    "ZeroPointDomain",
    "allocate",
    "calibrate_cpu",
    "compute_error",
    "config",
    "convert_checkpoint",
    "dequantize_",
    "explain",
    "find_uses",
    "fuse_convolutions",
    "get_model_size_in_bytes",
    "load_quantized",
    "quantize_",
    "quantize_checkpoint",
    "recipes_for_vllm",
    "register_weight_kind",
    "save_quantized",
    *recipes.__all__,
    *calibration.RECIPE_NAMES,
    *training.RECIPE_NAMES,
]
