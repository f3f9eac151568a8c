"""Quantization of an activation by rows on CUDA, by Triton, one kernel for each."""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.affine import MappingType, ZeroPointDomain
from ...primitives.qdtype import qdtype
from ...primitives.spec import QuantSpec
from .. import features
from ..custom_ops import implement, opaque, portable
from ..ops.quantize_rowwise import (
    Quantized,
    has_default_rows,
    is_absmax_rowwise,
    quantize_dynamic,
    quantize_int8_rowwise,
)

_HAS_TRITON = features.cuda_lacks("triton") is None
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

LONGEST_ROW = 16384
"""Of the asymmetric kernel, which holds a row in registers."""


@opaque(lambda x, dtype: (x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], 1, dtype=torch.float32)))
def cuda_quantize_rowwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Symmetric codes (M, K), int8 or float8, and scale (M, 1); opaque to compilers, whose fp32 divisions round
    otherwise."""
    if x.stride(1) != 1 and x.stride(0) == 1:
        # A transposed view, from which gradients of weights are made: the same numbers, read in memory order.
        from .triton.quantize_columns import quantize_columnwise

        return quantize_columnwise(x.t(), dtype)
    from .triton.quantize import quantize_rowwise

    codes, scale, _ = quantize_rowwise(x, dtype)
    return codes, scale


def _fake_asymmetric(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    column = (x.shape[0], 1)
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty(column, dtype=torch.float32),
        x.new_empty(column, dtype=torch.int8),
    )


@opaque(_fake_asymmetric)
def cuda_quantize_asymmetric(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 codes (M, K), scale and zero point (M, 1); see `triton/quantize_asymmetric.py`."""
    from .triton.quantize_asymmetric import quantize_rowwise_asymmetric

    return quantize_rowwise_asymmetric(x)


@implement("quantize_int8_rowwise", "cuda", where=_HAS_TRITON)
def triton_int8_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `quantize_int8_rowwise`."""
    if x.dim() != 2 or x.dtype not in _FLOATS:
        return portable(quantize_int8_rowwise)(x)
    codes, scale = cuda_quantize_rowwise(x, torch.int8)
    return codes, scale


@implement("quantize_dynamic", "cuda", where=_HAS_TRITON)
def triton_quantize_dynamic(x: Tensor, spec: QuantSpec) -> Quantized:
    """See `quantize_dynamic`."""
    if x.dtype in _FLOATS and _is_float8_rowwise(spec):
        codes, scale = cuda_quantize_rowwise(x, spec.dtype.storage)
        return codes, scale, None
    if x.dtype in _FLOATS and x.shape[1] <= LONGEST_ROW and _is_int8_asymmetric(spec):
        return cuda_quantize_asymmetric(x)
    return portable(quantize_dynamic)(x, spec)


def _is_float8_rowwise(spec: QuantSpec) -> bool:
    whole = (spec.dtype.quant_min, spec.dtype.quant_max)
    return spec.dtype.name in ("float8_e4m3fn", "float8_e5m2") and spec.code_range == whole and is_absmax_rowwise(spec)


def _is_int8_asymmetric(spec: QuantSpec) -> bool:
    codes = spec.dtype is qdtype("int8") and spec.code_range == (-128, 127)
    integers = spec.mapping is MappingType.ASYMMETRIC and spec.zero_point_domain is ZeroPointDomain.INT
    return codes and integers and has_default_rows(spec)
