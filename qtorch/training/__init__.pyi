"""Written by tools/stubs.py from the registry: `make stubs`."""
# ruff: noqa

from . import engine as engine
from . import injection as injection
from . import optim as optim
from . import quantization_aware as quantization_aware
from . import recipes as recipes
from . import weights as weights
from .conversion import Convert as convert
from .engine.convolutions import quantized_conv1d as quantized_conv1d
from .engine.convolutions import quantized_conv2d as quantized_conv2d
from .engine.convolutions import quantized_conv3d as quantized_conv3d
from .engine.convolutions import quantized_conv_transpose1d as quantized_conv_transpose1d
from .engine.convolutions import quantized_conv_transpose2d as quantized_conv_transpose2d
from .engine.convolutions import quantized_conv_transpose3d as quantized_conv_transpose3d
from .engine.functional import quantized_einsum as quantized_einsum
from .engine.functional import quantized_grouped_mm as quantized_grouped_mm
from .engine.functional import quantized_matmul as quantized_matmul
from .engine.gemm_spec import GemmSpec as GemmSpec
from .engine.gemm_spec import TrainingSpec as TrainingSpec
from .engine.numerics import fully_quantized as fully_quantized
from .engine.numerics import fully_quantized_float8 as fully_quantized_float8
from .engine.numerics import integer as integer
from .injection.injection import Injection as Injection
from .injection.injection import inject as inject
from .injection.mode import CallSite as CallSite
from .optim.adam import Adam4bit as Adam4bit
from .optim.adam import Adam8bit as Adam8bit
from .optim.adam import AdamFp8 as AdamFp8
from .optim.adam import AdamW4bit as AdamW4bit
from .optim.adam import AdamW8bit as AdamW8bit
from .optim.adam import AdamWFp8 as AdamWFp8
from .optim.cpu_offload import CPUOffloadOptimizer as CPUOffloadOptimizer
from .optim.qgalore import QGaLoreAdamW8bit as QGaLoreAdamW8bit
from .quantization_aware.fold_batch_norm import fold_batch_norm as fold_batch_norm
from .quantization_aware.layers import calibrate as calibrate
from .quantization_aware.learned import parameter_groups as parameter_groups
from .quantization_aware.recipes.lora_qat import LoRAQAT as lora_qat
from .quantization_aware.recipes.lsq import LSQ as lsq
from .quantization_aware.recipes.lsq import clip_penalty as clip_penalty
from .quantization_aware.recipes.lsq import pact as pact
from .quantization_aware.recipes.qat import QAT as qat
from .quantization_aware.recipes.qat import ScheduledQAT as scheduled_qat
from .quantization_aware.schedule import QuantizationSchedule as QuantizationSchedule
from .quantization_aware.schedule import advance_with as advance_with
from .recipes.base import MixedPrecisionTraining as mixed_precision_training
from .recipes.bitnet import BinaryTraining as binary_training
from .recipes.bitnet import BitnetTraining as bitnet_training
from .recipes.bitnet import precompute_bitnet_scale_for_fsdp as precompute_bitnet_scale_for_fsdp
from .recipes.float8 import Float8Training as float8_training
from .recipes.float8 import Mxfp8Training as mxfp8_training
from .recipes.int8 import Int4Training as int4_training
from .recipes.int8 import Int8MixedPrecisionTraining as int8_mixed_precision_training
from .recipes.int8 import Int8MixedPrecisionTrainingConfig as Int8MixedPrecisionTrainingConfig
from .recipes.int8 import Int8TilewiseTraining as int8_tilewise_training
from .recipes.int8 import SwitchbackTraining as switchback_training
from .recipes.int8_quantized import Int4WeightOnlyQuantizedTraining as int4_weight_only_quantized_training
from .recipes.int8_quantized import Int8WeightOnlyQuantizedTraining as int8_weight_only_quantized_training
from .recipes.scheduled import ScheduledTraining as scheduled_training
from .weights.base import TrainingWeight as TrainableWeight
from .weights.base import TrainingWeight as TrainingWeight
from .weights.codes import CodesWeight as CodesWeight
from .weights.codes import CodesWeight as QuantizedTrainingWeight
from .weights.codes import share_rounding as share_rounding
from .weights.master import MasterWeight as MasterWeight

__all__ = [
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "CPUOffloadOptimizer",
    "CallSite",
    "CodesWeight",
    "GemmSpec",
    "Injection",
    "Int8MixedPrecisionTrainingConfig",
    "MasterWeight",
    "QGaLoreAdamW8bit",
    "QuantizationSchedule",
    "QuantizedTrainingWeight",
    "TrainableWeight",
    "TrainingSpec",
    "TrainingWeight",
    "advance_with",
    "binary_training",
    "bitnet_training",
    "calibrate",
    "clip_penalty",
    "convert",
    "float8_training",
    "fold_batch_norm",
    "fully_quantized",
    "fully_quantized_float8",
    "inject",
    "int4_training",
    "int4_weight_only_quantized_training",
    "int8_mixed_precision_training",
    "int8_tilewise_training",
    "int8_weight_only_quantized_training",
    "integer",
    "lora_qat",
    "lsq",
    "mixed_precision_training",
    "mxfp8_training",
    "pact",
    "parameter_groups",
    "precompute_bitnet_scale_for_fsdp",
    "qat",
    "quantized_conv1d",
    "quantized_conv2d",
    "quantized_conv3d",
    "quantized_conv_transpose1d",
    "quantized_conv_transpose2d",
    "quantized_conv_transpose3d",
    "quantized_einsum",
    "quantized_grouped_mm",
    "quantized_matmul",
    "scheduled_qat",
    "scheduled_training",
    "share_rounding",
    "switchback_training",
]
