"""qtorch: quantize PyTorch models for inference, and train them in low precision.

    from qtorch import quantize_, int8_weight_only
    quantize_(model, int8_weight_only())

Here are `quantize_`, the recipes for inference, files and reports. What looks at data is in `qtorch.calibration`, what
trains in `qtorch.training`.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cli import answer_without_torch

__version__ = "0.1.0"

answer_without_torch()

# Many objects are made here, and each full collection would look through all of torch: 0.25 of 0.4 s.
_collects = gc.isenabled()
gc.disable()
try:
    from . import integrations, primitives, recipes  # noqa: F401 (public modules)
    from .dtypes import (
        AffineQuantizedTensor, BlockSparseLayout, LUTQuantizedTensor, PackedLayout, PlainLayout, SemiSparseLayout,
        TensorCoreTiledLayout,
    )  # fmt: skip
    from .kernels import tune_cpu
    from .kernels.config import config
    from .model.explain import explain
    from .model.module_repr import get_model_size_in_bytes
    from .model.report import QuantizeReport
    from .model.weight_kinds import register_weight_kind
    from .primitives import (
        CodebookSpec, LinearSpec, MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken, QuantSpec,
        ZeroPointDomain, compute_error,
    )  # fmt: skip
    from .primitives.discovery import no_attribute
    from .quantize_api import dequantize_, quantize_
    from .recipes import *  # noqa: F403
finally:
    if _collects:
        gc.enable()

if TYPE_CHECKING:
    from . import calibration, kv_cache, training  # noqa: F401
    from .checkpoint import load_quantized, save_quantized
    from .checkpoint.formats.compressed_tensors import recipes_for_vllm
    from .checkpoint.streaming.quantize_checkpoint import convert_checkpoint, quantize_checkpoint, save_gguf
    from .integrations import export, torchao  # noqa: F401
    from .integrations.fusion import fuse_convolutions, fuse_decoder, fuse_projections
    from .model.uses import find_uses

integrations.watch_imports()

__all__ = [
    "AffineQuantizedTensor", "BlockSparseLayout", "CodebookSpec", "LUTQuantizedTensor", "LinearSpec", "MappingType",
    "PackedLayout", "PerAxis", "PerBlock", "PerGroup", "PerRow", "PerTensor", "PerToken", "PlainLayout", "QuantSpec",
    "QuantizeReport", "SemiSparseLayout", "TensorCoreTiledLayout", "ZeroPointDomain", "compute_error", "config",
    "convert_checkpoint", "dequantize_", "explain", "find_uses", "fuse_convolutions", "fuse_decoder",
    "fuse_projections", "get_model_size_in_bytes", "load_quantized", "quantize_", "quantize_checkpoint",
    "recipes_for_vllm", "register_weight_kind", "save_gguf", "save_quantized", "tune_cpu",
]  # fmt: skip
__all__ += recipes.__all__

_ON_USE = {
    "qtorch": ("calibration", "checkpoint", "kv_cache", "training"),
    "qtorch.checkpoint": ("load_quantized", "save_quantized"),
    "qtorch.checkpoint.formats.compressed_tensors": ("recipes_for_vllm",),
    "qtorch.checkpoint.streaming.quantize_checkpoint": ("convert_checkpoint", "quantize_checkpoint", "save_gguf"),
    "qtorch.integrations": ("export", "torchao"),
    "qtorch.integrations.fusion": ("fuse_convolutions", "fuse_decoder", "fuse_projections"),
    "qtorch.model.uses": ("find_uses",),
}
"""What is imported when it is used, for a faster `import qtorch`: module -> its names, or modules in it."""

_PLACES = {
    "qtorch.calibration": ("allocate", "calibrated", "importance_weighted"),
    "qtorch.training": (
        "binary_training", "bitnet_training", "convert", "float8_training", "int4_training",
        "int4_weight_only_quantized_training", "int8_mixed_precision_training", "int8_tilewise_training",
        "int8_weight_only_quantized_training", "lora_qat", "lsq", "mixed_precision_training", "mxfp8_training", "qat",
        "scheduled_qat", "scheduled_training", "switchback_training",
    ),
}  # fmt: skip
_MOVED = {name: f"{place}.{name}" for place, names in _PLACES.items() for name in names} | {
    "allocation": "qtorch.calibration.allocation", "calibrate_cpu": "qtorch.tune_cpu", "compat": "qtorch.integrations",
    "formats": "qtorch.checkpoint.formats", "fusion": "qtorch.integrations.fusion",
    "layouts": "qtorch.primitives.layouts", "recipe": "qtorch.recipes.base",
    "statistics": "qtorch.calibration.statistics", "streaming": "qtorch.checkpoint.streaming",
}  # fmt: skip


if not TYPE_CHECKING:  # type checkers would take any name

    def __getattr__(name: str) -> Any:
        for place, names in _ON_USE.items():
            if name in names:
                is_module = place in ("qtorch", "qtorch.integrations")
                value = import_module(f"{place}.{name}") if is_module else getattr(import_module(place), name)
                globals()[name] = value
                return value
        moved = f"qtorch.{name} has moved: write {_MOVED[name]}" if name in _MOVED else ""
        raise no_attribute("qtorch", name, [*__all__, *_MOVED, *_ON_USE["qtorch"]], moved)
