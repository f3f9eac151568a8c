"""qtorch: quantize PyTorch models for inference, and train them in low precision.

from qtorch import quantize_, int8_weight_only
quantize_(model, int8_weight_only())
"""

from .cli import answer_without_torch

answer_without_torch()

from .primitives.supported_versions import check_version as _check_version

_check_version("torch")

from . import calibration, integrations, recipes, training  # noqa: F401 (they register what they hold)
from . import kv_cache as kv_cache
from .calibration.allocation import allocate
from .checkpoint import (
    formats,  # noqa: F401 (registers what it holds)
    load_quantized,
    save_quantized,
)
from .checkpoint.formats.compressed_tensors import recipes_for_vllm
from .checkpoint.streaming.quantize_checkpoint import convert_checkpoint, quantize_checkpoint
from .dtypes import (
    AffineQuantizedTensor,
    BlockSparseLayout,
    LUTQuantizedTensor,
    PackedLayout,
    PlainLayout,
    SemiSparseLayout,
    TensorCoreTiledLayout,
)
from .integrations import export as export
from .integrations import torchao as torchao
from .integrations import watch_imports as _watch_imports
from .integrations.fusion import fuse_convolutions
from .kernels import calibrate_cpu
from .kernels.config import config
from .model.explain import explain
from .model.module_repr import get_model_size_in_bytes
from .model.report import QuantizeReport
from .model.uses import find_uses
from .model.weight_kinds import register_weight_kind
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
from .recipes import *  # noqa: F403 (every recipe, by its name)

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
