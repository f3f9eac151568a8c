"""For users of torchao: its names and arguments, which return recipes of qtorch.

    from qtorch.integrations.torchao import Int4WeightOnlyConfig, quantize_
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
from ...model.module_repr import get_model_size_in_bytes
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
from . import configs, functions, observers, steps, training
from .configs import *  # noqa: F403
from .functions import *  # noqa: F403
from .observers import *  # noqa: F403
from .steps import *  # noqa: F403
from .training import *  # noqa: F403

PlainLayoutType, SemiSparseLayoutType, TensorCoreTiledLayoutType = PlainLayout, SemiSparseLayout, TensorCoreTiledLayout
"""Their names in torchao 0.6."""


def unwrap_tensor_subclass(model: nn.Module, filter_fn: object = None) -> nn.Module:
    """Return the model as it is: `torch.compile` and `torch.export` take quantized tensors."""
    return model


__all__ = [
    "AffineQuantizedTensor",
    "MappingType",
    "PerAxis",
    "PerBlock",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "PerToken",
    "PlainLayout",
    "PlainLayoutType",
    "SemiSparseLayout",
    "SemiSparseLayoutType",
    "TensorCoreTiledLayout",
    "TensorCoreTiledLayoutType",
    "UintxTensor",
    "ZeroPointDomain",
    "choose_qparams_affine",
    "choose_qparams_affine_with_min_max",
    "compute_error",
    "dequantize_affine",
    "fake_quantize_affine",
    "get_model_size_in_bytes",
    "int_scaled_matmul",
    "linear_nf4",
    "precompute_bitnet_scale_for_fsdp",
    "quantize_affine",
    "safe_int_mm",
    "to_affine_quantized_floatx",
    "to_affine_quantized_floatx_static",
    "to_affine_quantized_fpx",
    "to_affine_quantized_intx",
    "to_affine_quantized_intx_static",
    "to_linear_activation_quantized",
    "to_nf4",
    "to_uintx",
    "unwrap_tensor_subclass",
]
__all__ += configs.__all__
__all__ += functions.__all__
__all__ += observers.__all__
__all__ += steps.__all__
__all__ += training.__all__
