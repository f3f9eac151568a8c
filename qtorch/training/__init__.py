"""Training in low precision, quantization-aware training, and optimizers with states of few bits.

quantize_(model, int8_mixed_precision_training())
...  # train as usual
quantize_(model, convert())
"""

from .distillation import Distillation, DistillationMixin, Teacher, TopLogits, distill, distillation_loss
from .engine.functional import (
    quantized_conv1d, quantized_conv2d, quantized_conv3d, quantized_conv_transpose1d, quantized_conv_transpose2d,
    quantized_conv_transpose3d, quantized_einsum, quantized_grouped_mm, quantized_matmul,
)  # fmt: skip
from .engine.gemm_spec import GemmSpec, TrainingSpec
from .engine.numerics import fully_quantized, fully_quantized_float8, integer
from .injection.injection import Injection, inject
from .injection.mode import CallSite
from .optim.adam import Adam4bit, Adam8bit, AdamFp8, AdamW4bit, AdamW8bit, AdamWFp8
from .optim.cpu_offload import CPUOffloadOptimizer
from .optim.muon import Muon8bit
from .optim.qgalore import QGaLoreAdamW8bit
from .quantization_aware.fold_batch_norm import fold_batch_norm
from .quantization_aware.layers import calibrate
from .quantization_aware.learned import parameter_groups
from .quantization_aware.recipes.lora_qat import LoRAQAT as lora_qat
from .quantization_aware.quantizers import average_ranges_over
from .quantization_aware.recipes.lsq import LSQ as lsq
from .quantization_aware.recipes.lsq import clip_penalty, pact
from .quantization_aware.recipes.qat import QAT as qat
from .quantization_aware.recipes.qat import ScheduledQAT as scheduled_qat
from .quantization_aware.schedule import QuantizationSchedule, advance_with
from .recipes.base import Convert as convert
from .recipes.base import MixedPrecisionTraining as mixed_precision_training
from .recipes.bitnet import BinaryTraining as binary_training
from .recipes.bitnet import BitnetTraining as bitnet_training
from .recipes.floats import Mxfp4Training as mxfp4_training
from .recipes.floats import Nvfp4Training as nvfp4_training
from .recipes.floats import Float8Training as float8_training
from .recipes.floats import Mxfp8Training as mxfp8_training
from .recipes.int8 import Int4Training as int4_training
from .recipes.int8 import Int8MixedPrecisionTraining as int8_mixed_precision_training
from .recipes.int8 import Int8MixedPrecisionTrainingConfig
from .recipes.int8 import Int8TilewiseTraining as int8_tilewise_training
from .recipes.int8 import SwitchbackTraining as switchback_training
from .recipes.quantized_weights import Int4WeightOnlyQuantizedTraining as int4_weight_only_quantized_training
from .recipes.quantized_weights import Int8WeightOnlyQuantizedTraining as int8_weight_only_quantized_training
from .recipes.quantized_weights import WeightOnlyQuantizedTraining as weight_only_quantized_training
from .recipes.scheduled import ScheduledTraining as scheduled_training
from .rollouts import batch_invariant, sync_codes
from .saved_tensors import save_in_codes
from .weights.base import TrainingWeight
from .weights.codes import CodesWeight, share_rounding
from .weights.master import MasterWeight, precompute_scales_for_fsdp

__all__ = [
    "Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8", "CPUOffloadOptimizer", "CallSite",
    "CodesWeight", "Distillation", "DistillationMixin", "GemmSpec", "Injection", "Int8MixedPrecisionTrainingConfig",
    "MasterWeight", "Muon8bit", "QGaLoreAdamW8bit", "QuantizationSchedule", "Teacher", "TopLogits", "TrainingSpec",
    "TrainingWeight", "advance_with", "average_ranges_over", "batch_invariant", "binary_training", "bitnet_training",
    "calibrate", "clip_penalty", "convert", "distill", "distillation_loss", "float8_training", "fold_batch_norm",
    "fully_quantized", "fully_quantized_float8", "inject", "int4_training", "int4_weight_only_quantized_training",
    "int8_mixed_precision_training", "int8_tilewise_training", "int8_weight_only_quantized_training", "integer",
    "lora_qat", "lsq", "mixed_precision_training", "mxfp4_training", "mxfp8_training", "nvfp4_training", "pact",
    "parameter_groups", "precompute_scales_for_fsdp", "qat", "quantized_conv1d", "quantized_conv2d", "quantized_conv3d",
    "quantized_conv_transpose1d", "quantized_conv_transpose2d", "quantized_conv_transpose3d", "quantized_einsum",
    "quantized_grouped_mm", "quantized_matmul", "save_in_codes", "scheduled_qat", "scheduled_training",
    "share_rounding", "switchback_training", "sync_codes", "weight_only_quantized_training",
]  # fmt: skip
