"""Written by tools/stubs.py from the registry: `make stubs`."""
# ruff: noqa

from . import allocation as allocation
from . import blockwise as blockwise
from . import calibration as calibration
from . import checkpoint as checkpoint
from . import cli as cli
from . import compat as compat
from . import dtypes as dtypes
from . import export as export
from . import formats as formats
from . import fusion as fusion
from . import integrations as integrations
from . import kernels as kernels
from . import kv_cache as kv_cache
from . import layouts as layouts
from . import primitives as primitives
from . import recipes as recipes
from . import statistics as statistics
from . import streaming as streaming
from . import tracing as tracing
from . import training as training
from .allocation.allocate import allocate as allocate
from .calibration.calibrated import CalibratedRecipe as calibrated
from .calibration.importance_weighted import ImportanceWeighted as importance_weighted
from .checkpoint.load import load_quantized as load_quantized
from .checkpoint.save import save_quantized as save_quantized
from .config import config as config
from .dtypes.affine import AffineQuantizedTensor as AffineQuantizedTensor
from .dtypes.codebook import LUTQuantizedTensor as LUTQuantizedTensor
from .explain import explain as explain
from .find_uses import find_uses as find_uses
from .formats.compressed_tensors.serving import recipes_for_vllm as recipes_for_vllm
from .fusion.fused_model import fuse_convolutions as fuse_convolutions
from .kernels.cpu.calibrate import calibrate_cpu as calibrate_cpu
from .layouts.block_sparse import BlockSparseLayout as BlockSparseLayout
from .layouts.packed import PackedLayout as PackedLayout
from .layouts.plain import PlainLayout as PlainLayout
from .layouts.semi_sparse import SemiSparseLayout as SemiSparseLayout
from .layouts.tensor_core_tiled import TensorCoreTiledLayout as TensorCoreTiledLayout
from .model_size import get_model_size_in_bytes as get_model_size_in_bytes
from .primitives.affine import MappingType as MappingType
from .primitives.affine import ZeroPointDomain as ZeroPointDomain
from .primitives.codebook_spec import CodebookSpec as CodebookSpec
from .primitives.granularity import PerAxis as PerAxis
from .primitives.granularity import PerBlock as PerBlock
from .primitives.granularity import PerGroup as PerGroup
from .primitives.granularity import PerRow as PerRow
from .primitives.granularity import PerTensor as PerTensor
from .primitives.granularity import PerToken as PerToken
from .primitives.spec import LinearSpec as LinearSpec
from .primitives.spec import QuantSpec as QuantSpec
from .primitives.sqnr import compute_error as compute_error
from .quantize_api import dequantize_ as dequantize_
from .quantize_api import quantize_ as quantize_
from .quantize_checkpoint import convert_checkpoint as convert_checkpoint
from .quantize_checkpoint import quantize_checkpoint as quantize_checkpoint
from .recipes.block_sparse import BlockSparse as block_sparse
from .recipes.float8_dynamic_activation_float8_semi_sparse_weight import Float8DynamicActivationFloat8SemiSparseWeight as float8_dynamic_activation_float8_semi_sparse_weight
from .recipes.float8_dynamic_activation_float8_weight import Float8DynamicActivationFloat8Weight as float8_dynamic_activation_float8_weight
from .recipes.float8_dynamic_activation_int4_weight import Float8DynamicActivationInt4Weight as float8_dynamic_activation_int4_weight
from .recipes.float8_static_activation_float8_weight import Float8StaticActivationFloat8Weight as float8_static_activation_float8_weight
from .recipes.float8_weight_only import Float8WeightOnly as float8_weight_only
from .recipes.fpx_weight_only import FpxWeightOnly as fpx_weight_only
from .recipes.int4_weight_only import Int4WeightOnly as int4_weight_only
from .recipes.int8_dynamic_activation_int4_weight import Int8DynamicActivationInt4Weight as int8_dynamic_activation_int4_weight
from .recipes.int8_dynamic_activation_int8_semi_sparse_weight import Int8DynamicActivationInt8SemiSparseWeight as int8_dynamic_activation_int8_semi_sparse_weight
from .recipes.int8_dynamic_activation_int8_weight import Int8DynamicActivationInt8Weight as int8_dynamic_activation_int8_weight
from .recipes.int8_static_activation_int8_weight import Int8StaticActivationInt8Weight as int8_static_activation_int8_weight
from .recipes.int8_weight_only import Int8WeightOnly as int8_weight_only
from .recipes.intx_weight_only import IntxWeightOnly as intx_weight_only
from .recipes.lut_weight_only import LUTWeightOnly as lut_weight_only
from .recipes.mx import Mxfp4DynamicActivationMxfp4Weight as mxfp4_dynamic_activation_mxfp4_weight
from .recipes.mx import Mxfp4WeightOnly as mxfp4_weight_only
from .recipes.mx import Mxfp6WeightOnly as mxfp6_weight_only
from .recipes.mx import Mxfp8DynamicActivationMxfp8Weight as mxfp8_dynamic_activation_mxfp8_weight
from .recipes.mx import Mxfp8WeightOnly as mxfp8_weight_only
from .recipes.nf4_weight_only import NF4WeightOnly as nf4_weight_only
from .recipes.nvfp4 import Nvfp4DynamicActivationNvfp4Weight as nvfp4_dynamic_activation_nvfp4_weight
from .recipes.nvfp4 import Nvfp4WeightOnly as nvfp4_weight_only
from .recipes.uintx_weight_only import UIntxWeightOnly as uintx_weight_only
from .report import QuantizeReport as QuantizeReport
from .training.convert import Convert as convert
from .training.quantization_aware.recipes.lora_qat import LoRAQAT as lora_qat
from .training.quantization_aware.recipes.lsq import LSQ as lsq
from .training.quantization_aware.recipes.qat import QAT as qat
from .training.quantization_aware.recipes.scheduled_qat import ScheduledQAT as scheduled_qat
from .training.recipes.binary import BinaryTraining as binary_training
from .training.recipes.bitnet import BitnetTraining as bitnet_training
from .training.recipes.float8 import Float8Training as float8_training
from .training.recipes.int4 import Int4Training as int4_training
from .training.recipes.int8_mixed_precision import Int8MixedPrecisionTraining as int8_mixed_precision_training
from .training.recipes.int8_quantized import Int4WeightOnlyQuantizedTraining as int4_weight_only_quantized_training
from .training.recipes.int8_quantized import Int8WeightOnlyQuantizedTraining as int8_weight_only_quantized_training
from .training.recipes.int8_tilewise import Int8TilewiseTraining as int8_tilewise_training
from .training.recipes.mixed_precision import MixedPrecisionTraining as mixed_precision_training
from .training.recipes.mxfp8 import Mxfp8Training as mxfp8_training
from .training.recipes.switchback import SwitchbackTraining as switchback_training
from .training.scheduled.scheduled_training import ScheduledTraining as scheduled_training
from .weight_kinds import register_weight_kind as register_weight_kind

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
