"""For users of torchao: its names and arguments, which return recipes of qtorch.

    from qtorch.compat.torchao import Int4WeightOnlyConfig, quantize_
    quantize_(model, Int4WeightOnlyConfig(group_size=32))

The functions of torchao 0.6 and 0.7 (`int4_weight_only(layout=..., use_hqq=...)`), the configurations of 0.18
(`Int4WeightOnlyConfig`, `FqnToConfig`, ...), and the other public names of 0.6 that have an equivalent. An argument
without one raises a `ValueError`. torchao need not be installed.
"""

from torch import nn

from ...dtypes import (
    AffineQuantizedTensor,
    PlainLayout,
    SemiSparseLayout,
    TensorCoreTiledLayout,
    UintxTensor,
    linear_nf4,
    to_affine_quantized_floatx,
    to_affine_quantized_floatx_static,
    to_affine_quantized_fpx,
    to_affine_quantized_intx,
    to_affine_quantized_intx_static,
    to_linear_activation_quantized,
    to_nf4,
    to_uintx,
)
from ...kernels import int_matmul as safe_int_mm
from ...kernels import int_scaled_matmul
from ...model_size import get_model_size_in_bytes
from ...primitives import (
    MappingType,
    PerAxis,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
    ZeroPointDomain,
    choose_qparams_affine,
    choose_qparams_affine_with_min_max,
    compute_error,
    dequantize_affine,
    fake_quantize_affine,
    quantize_affine,
)
from ...training import precompute_bitnet_scale_for_fsdp
from .autoquant import (
    ALL_AUTOQUANT_CLASS_LIST,
    DEFAULT_AUTOQUANT_CLASS_LIST,
    DEFAULT_INT4_AUTOQUANT_CLASS_LIST,
    OTHER_AUTOQUANT_CLASS_LIST,
    autoquant,
)
from .configs import (
    AOPerModuleConfig,
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    Float8StaticActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    ModuleFqnToConfig,
    MXDynamicActivationMXWeightConfig,
    NF4WeightOnlyConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
    UIntxWeightOnlyConfig,
)
from .equivalents import equivalent
from .from_observers import from_observers
from .functions import (
    float8_dynamic_activation_float8_weight,
    float8_static_activation_float8_weight,
    float8_weight_only,
    fpx_weight_only,
    int4_weight_only,
    int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_semi_sparse_weight,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    uintx_weight_only,
)
from .observers import (
    AffineQuantizedMinMaxObserver,
    AffineQuantizedObserverBase,
    LinearActivationWeightObservedTensor,
    insert_observers_,
)
from .steps import (
    AWQConfig,
    BlockSparseWeightConfig,
    SemiSparseWeightConfig,
    SmoothQuantConfig,
    block_sparse_weight,
    quantize_,
    semi_sparse_weight,
    sparsify_,
)
from .training import (
    BitNetTrainingConfig,
    FakeQuantizeConfig,
    Float8FakeQuantizeConfig,
    Int4WeightFakeQuantizeConfig,
    Int8MixedPrecisionTrainingConfig,
    Int8WeightOnlyQuantizedTrainingConfig,
    IntxFakeQuantizeConfig,
    QATConfig,
    bitnet_training,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
)

PlainLayoutType, SemiSparseLayoutType, TensorCoreTiledLayoutType = PlainLayout, SemiSparseLayout, TensorCoreTiledLayout
"""Their names in torchao 0.6."""


def unwrap_tensor_subclass(model: nn.Module, filter_fn: object = None) -> nn.Module:
    """Return the model as it is: `torch.compile` and `torch.export` take quantized tensors."""
    return model


__all__ = [
    "ALL_AUTOQUANT_CLASS_LIST",
    "DEFAULT_AUTOQUANT_CLASS_LIST",
    "DEFAULT_INT4_AUTOQUANT_CLASS_LIST",
    "OTHER_AUTOQUANT_CLASS_LIST",
    "AOPerModuleConfig",
    "AWQConfig",
    "AffineQuantizedMinMaxObserver",
    "AffineQuantizedObserverBase",
    "AffineQuantizedTensor",
    "BitNetTrainingConfig",
    "BlockSparseWeightConfig",
    "FakeQuantizeConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8DynamicActivationInt4WeightConfig",
    "Float8FakeQuantizeConfig",
    "Float8StaticActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "FqnToConfig",
    "Int4WeightFakeQuantizeConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8MixedPrecisionTrainingConfig",
    "Int8StaticActivationInt8WeightConfig",
    "Int8WeightOnlyConfig",
    "Int8WeightOnlyQuantizedTrainingConfig",
    "IntxFakeQuantizeConfig",
    "IntxWeightOnlyConfig",
    "LinearActivationWeightObservedTensor",
    "MXDynamicActivationMXWeightConfig",
    "MappingType",
    "ModuleFqnToConfig",
    "NF4WeightOnlyConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4WeightOnlyConfig",
    "PerAxis",
    "PerBlock",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "PerToken",
    "PlainLayout",
    "PlainLayoutType",
    "QATConfig",
    "SemiSparseLayout",
    "SemiSparseLayoutType",
    "SemiSparseWeightConfig",
    "SmoothQuantConfig",
    "TensorCoreTiledLayout",
    "TensorCoreTiledLayoutType",
    "UIntxWeightOnlyConfig",
    "UintxTensor",
    "ZeroPointDomain",
    "autoquant",
    "bitnet_training",
    "block_sparse_weight",
    "choose_qparams_affine",
    "choose_qparams_affine_with_min_max",
    "compute_error",
    "dequantize_affine",
    "equivalent",
    "fake_quantize_affine",
    "float8_dynamic_activation_float8_weight",
    "float8_static_activation_float8_weight",
    "float8_weight_only",
    "fpx_weight_only",
    "from_observers",
    "get_model_size_in_bytes",
    "insert_observers_",
    "int4_weight_only",
    "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_int8_semi_sparse_weight",
    "int8_dynamic_activation_int8_weight",
    "int8_mixed_precision_training",
    "int8_weight_only",
    "int8_weight_only_quantized_training",
    "int_scaled_matmul",
    "linear_nf4",
    "precompute_bitnet_scale_for_fsdp",
    "quantize_",
    "quantize_affine",
    "safe_int_mm",
    "semi_sparse_weight",
    "sparsify_",
    "to_affine_quantized_floatx",
    "to_affine_quantized_floatx_static",
    "to_affine_quantized_fpx",
    "to_affine_quantized_intx",
    "to_affine_quantized_intx_static",
    "to_linear_activation_quantized",
    "to_nf4",
    "to_uintx",
    "uintx_weight_only",
    "unwrap_tensor_subclass",
]
