"""For users of torchao: its names and arguments, which return recipes of qtorch.

    from qtorch.integrations.torchao import Int4WeightOnlyConfig, quantize_
    quantize_(model, Int4WeightOnlyConfig(group_size=32))

The functions of torchao 0.6 and 0.7 (`int4_weight_only(layout=..., use_hqq=...)`), the configurations of 0.18
(`Int4WeightOnlyConfig`, `FqnToConfig`, ...), and the other public names of 0.6 that have an equivalent. An argument
without one raises a `ValueError`. torchao need not be installed.
"""

# ruff: noqa: F401, F403 (each name is written once, where it is imported)

import types

from torch import nn

from ...dtypes import (
    AffineQuantizedTensor, PlainLayout, SemiSparseLayout, TensorCoreTiledLayout, UintxTensor, linear_nf4,
    to_affine_quantized_floatx, to_affine_quantized_floatx_static, to_affine_quantized_fpx, to_affine_quantized_intx,
    to_affine_quantized_intx_static, to_linear_activation_quantized, to_nf4, to_uintx,
)  # fmt: skip
from ...kernels import int_matmul as safe_int_mm
from ...kernels import int_scaled_matmul
from ...model.module_repr import get_model_size_in_bytes
from ...primitives import (
    MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken, ZeroPointDomain, choose_qparams_affine,
    choose_qparams_affine_with_min_max, compute_error, dequantize_affine, fake_quantize_affine, quantize_affine,
)  # fmt: skip
from .configs import *
from .functions import *
from .observers import *
from .steps import *
from .training import *

PlainLayoutType, SemiSparseLayoutType, TensorCoreTiledLayoutType = PlainLayout, SemiSparseLayout, TensorCoreTiledLayout
"""Their names in torchao 0.6."""


def unwrap_tensor_subclass(model: nn.Module, filter_fn: object = None) -> nn.Module:
    """Return the model as it is: `torch.compile` and `torch.export` take quantized tensors."""
    return model


__all__ = [name for name, this in globals().items() if not (name.startswith("_") or isinstance(this, types.ModuleType))]
