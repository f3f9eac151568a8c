"""Written by tools/stubs.py from the registry: `make stubs`."""
# ruff: noqa

from . import calibration as calibration
from . import checkpoint as checkpoint
from . import cli as cli
from . import dtypes as dtypes
from . import integrations as integrations
from . import kernels as kernels
from . import kv_cache as kv_cache
from . import primitives as primitives
from . import recipes as recipes
from . import training as training
from .calibration.allocation.allocate import allocate as allocate
from .calibration.calibrated import CalibratedRecipe as calibrated
from .calibration.importance_weighted import ImportanceWeighted as importance_weighted
from .checkpoint.formats.compressed_tensors.serving import recipes_for_vllm as recipes_for_vllm
from .checkpoint.load import load_quantized as load_quantized
from .checkpoint.save import save_quantized as save_quantized
from .checkpoint.streaming.quantize_checkpoint import convert_checkpoint as convert_checkpoint
from .checkpoint.streaming.quantize_checkpoint import quantize_checkpoint as quantize_checkpoint
from .dtypes.affine_tensor import AffineQuantizedTensor as AffineQuantizedTensor
from .dtypes.codebook_tensor import LUTQuantizedTensor as LUTQuantizedTensor
from .integrations.fusion.fused_model import fuse_convolutions as fuse_convolutions
from .kernels.config import config as config
from .kernels.cpu.tuning import calibrate_cpu as calibrate_cpu
from .model.explain import explain as explain
from .model.module_repr import get_model_size_in_bytes as get_model_size_in_bytes
from .model.report import QuantizeReport as QuantizeReport
from .model.uses import find_uses as find_uses
from .model.weight_kinds import register_weight_kind as register_weight_kind
from .primitives.affine import MappingType as MappingType
from .primitives.affine import ZeroPointDomain as ZeroPointDomain
from .primitives.codebooks import CodebookSpec as CodebookSpec
from .primitives.granularity import PerAxis as PerAxis
from .primitives.granularity import PerBlock as PerBlock
from .primitives.granularity import PerGroup as PerGroup
from .primitives.granularity import PerRow as PerRow
from .primitives.granularity import PerTensor as PerTensor
from .primitives.granularity import PerToken as PerToken
from .primitives.layouts.block_sparse import BlockSparseLayout as BlockSparseLayout
from .primitives.layouts.packed import PackedLayout as PackedLayout
from .primitives.layouts.plain import PlainLayout as PlainLayout
from .primitives.layouts.semi_sparse import SemiSparseLayout as SemiSparseLayout
from .primitives.layouts.tensor_core_tiled import TensorCoreTiledLayout as TensorCoreTiledLayout
from .primitives.spec import LinearSpec as LinearSpec
from .primitives.spec import QuantSpec as QuantSpec
from .primitives.sqnr import compute_error as compute_error
from .quantize_api import dequantize_ as dequantize_
from .quantize_api import quantize_ as quantize_
from .recipes.codebook import LUTWeightOnly as lut_weight_only
from .recipes.codebook import NF4WeightOnly as nf4_weight_only
from .recipes.float8 import Float8DynamicActivationFloat8Weight as float8_dynamic_activation_float8_weight
from .recipes.float8 import Float8DynamicActivationInt4Weight as float8_dynamic_activation_int4_weight
from .recipes.float8 import Float8WeightOnly as float8_weight_only
from .recipes.float8 import FpxWeightOnly as fpx_weight_only
from .recipes.integer import Int4WeightOnly as int4_weight_only
from .recipes.integer import Int8DynamicActivationInt4Weight as int8_dynamic_activation_int4_weight
from .recipes.integer import Int8DynamicActivationInt8Weight as int8_dynamic_activation_int8_weight
from .recipes.integer import Int8WeightOnly as int8_weight_only
from .recipes.integer import IntxWeightOnly as intx_weight_only
from .recipes.integer import UIntxWeightOnly as uintx_weight_only
from .recipes.mx import Mxfp4DynamicActivationMxfp4Weight as mxfp4_dynamic_activation_mxfp4_weight
from .recipes.mx import Mxfp4WeightOnly as mxfp4_weight_only
from .recipes.mx import Mxfp6WeightOnly as mxfp6_weight_only
from .recipes.mx import Mxfp8DynamicActivationMxfp8Weight as mxfp8_dynamic_activation_mxfp8_weight
from .recipes.mx import Mxfp8WeightOnly as mxfp8_weight_only
from .recipes.mx import Nvfp4DynamicActivationNvfp4Weight as nvfp4_dynamic_activation_nvfp4_weight
from .recipes.mx import Nvfp4WeightOnly as nvfp4_weight_only
from .recipes.sparse import BlockSparse as block_sparse
from .recipes.sparse import Float8DynamicActivationFloat8SemiSparseWeight as float8_dynamic_activation_float8_semi_sparse_weight
from .recipes.sparse import Int8DynamicActivationInt8SemiSparseWeight as int8_dynamic_activation_int8_semi_sparse_weight
from .recipes.static import Float8StaticActivationFloat8Weight as float8_static_activation_float8_weight
from .recipes.static import Int8StaticActivationInt8Weight as int8_static_activation_int8_weight
from .training.conversion import Convert as convert
from .training.quantization_aware.recipes.lora_qat import LoRAQAT as lora_qat
from .training.quantization_aware.recipes.lsq import LSQ as lsq
from .training.quantization_aware.recipes.qat import QAT as qat
from .training.quantization_aware.recipes.qat import ScheduledQAT as scheduled_qat
from .training.recipes.base import MixedPrecisionTraining as mixed_precision_training
from .training.recipes.bitnet import BinaryTraining as binary_training
from .training.recipes.bitnet import BitnetTraining as bitnet_training
from .training.recipes.float8 import Float8Training as float8_training
from .training.recipes.float8 import Mxfp8Training as mxfp8_training
from .training.recipes.int8 import Int4Training as int4_training
from .training.recipes.int8 import Int8MixedPrecisionTraining as int8_mixed_precision_training
from .training.recipes.int8 import Int8TilewiseTraining as int8_tilewise_training
from .training.recipes.int8 import SwitchbackTraining as switchback_training
from .training.recipes.int8_quantized import Int4WeightOnlyQuantizedTraining as int4_weight_only_quantized_training
from .training.recipes.int8_quantized import Int8WeightOnlyQuantizedTraining as int8_weight_only_quantized_training
from .training.recipes.scheduled import ScheduledTraining as scheduled_training

__version__: str
__all__ = [
    "AffineQuantizedTensor",
    "BlockSparseLayout",
    "CodebookSpec",
    "LUTQuantizedTensor",
    "LinearSpec",
    "MappingType",
    "PackedLayout",
    "PerAxis",
    "PerBlock",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "PerToken",
    "PlainLayout",
    "QuantSpec",
    "QuantizeReport",
    "SemiSparseLayout",
    "TensorCoreTiledLayout",
    "ZeroPointDomain",
    "allocate",
    "binary_training",
    "bitnet_training",
    "block_sparse",
    "calibrate_cpu",
    "calibrated",
    "compute_error",
    "config",
    "convert",
    "convert_checkpoint",
    "dequantize_",
    "explain",
    "find_uses",
    "float8_dynamic_activation_float8_semi_sparse_weight",
    "float8_dynamic_activation_float8_weight",
    "float8_dynamic_activation_int4_weight",
    "float8_static_activation_float8_weight",
    "float8_training",
    "float8_weight_only",
    "fpx_weight_only",
    "fuse_convolutions",
    "get_model_size_in_bytes",
    "importance_weighted",
    "int4_training",
    "int4_weight_only",
    "int4_weight_only_quantized_training",
    "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_int8_semi_sparse_weight",
    "int8_dynamic_activation_int8_weight",
    "int8_mixed_precision_training",
    "int8_static_activation_int8_weight",
    "int8_tilewise_training",
    "int8_weight_only",
    "int8_weight_only_quantized_training",
    "intx_weight_only",
    "load_quantized",
    "lora_qat",
    "lsq",
    "lut_weight_only",
    "mixed_precision_training",
    "mxfp4_dynamic_activation_mxfp4_weight",
    "mxfp4_weight_only",
    "mxfp6_weight_only",
    "mxfp8_dynamic_activation_mxfp8_weight",
    "mxfp8_training",
    "mxfp8_weight_only",
    "nf4_weight_only",
    "nvfp4_dynamic_activation_nvfp4_weight",
    "nvfp4_weight_only",
    "qat",
    "quantize_",
    "quantize_checkpoint",
    "recipes_for_vllm",
    "register_weight_kind",
    "save_quantized",
    "scheduled_qat",
    "scheduled_training",
    "switchback_training",
    "uintx_weight_only",
]
