"""Functions that make quantized tensors, with the names and argument orders of torchao 0.6."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layouts import Layout, PackedLayout, PlainLayout
from ..primitives.affine import MappingType, ZeroPointDomain
from ..primitives.floatx import FloatFormat
from ..primitives.granularity import PerBlock, PerRow
from ..primitives.qdtype import QDType, qdtype
from ..primitives.spec import LinearSpec, QuantSpec
from .affine import AffineQuantizedTensor


def to_affine_quantized_intx(
    input_float: Tensor,
    mapping_type: MappingType,
    block_size: Sequence[int],
    target_dtype: torch.dtype | QDType,
    quant_min: int | None = None,
    quant_max: int | None = None,
    eps: float | None = None,
    scale_dtype: torch.dtype | None = None,
    zero_point_dtype: torch.dtype | None = None,
    preserve_zero: bool = True,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
    _layout: Layout = PlainLayout(),
) -> AffineQuantizedTensor:
    """Quantize a float tensor to integer codes with scales chosen from its blocks.

    `zero_point_dtype` is accepted for compatibility and ignored: zero points are stored, without loss, in the storage
    dtype of the codes, or in the dtype of the scale where they are real numbers.
    """
    spec = QuantSpec(
        target_dtype,  # type: ignore[arg-type]
        PerBlock(tuple(block_size)),
        mapping_type,
        zero_point_domain,
        scale_dtype=scale_dtype,
        eps=eps,
        quant_min=quant_min,
        quant_max=quant_max,
        preserve_zero=preserve_zero,
    )
    return AffineQuantizedTensor.from_float(input_float, LinearSpec(spec, layout=_layout))


def to_affine_quantized_intx_static(
    input_float: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    block_size: Sequence[int],
    target_dtype: torch.dtype | QDType,
    quant_min: int | None = None,
    quant_max: int | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
    _layout: Layout = PlainLayout(),
) -> AffineQuantizedTensor:
    """Quantize a float tensor with given scales and zero points, one element per block."""
    spec = QuantSpec(
        target_dtype,  # type: ignore[arg-type]
        PerBlock(tuple(block_size)),
        MappingType.SYMMETRIC if zero_point is None else MappingType.ASYMMETRIC,
        ZeroPointDomain.NONE if zero_point is None else zero_point_domain,
        quant_min=quant_min,
        quant_max=quant_max,
    )
    shape = spec.scale_shape(input_float.shape)
    scale = scale.reshape(shape)
    if zero_point is not None:
        zero_point = zero_point.reshape(shape)
        if zero_point_domain is ZeroPointDomain.INT:
            zero_point = zero_point.to(spec.dtype.storage)
    codes = spec.quantize(input_float, scale, zero_point)
    linear = LinearSpec(spec, layout=_layout)
    return AffineQuantizedTensor.from_plain(codes, scale, zero_point, linear, input_float.dtype)


def to_affine_quantized_floatx(
    input_float: Tensor,
    block_size: Sequence[int],
    target_dtype: torch.dtype | QDType,
    _layout: Layout = PlainLayout(),
    scale_dtype: torch.dtype | None = None,
) -> AffineQuantizedTensor:
    """Quantize a float tensor to floating-point codes (float8): code = cast(x / scale), the largest code at absmax."""
    spec = QuantSpec(
        target_dtype,  # type: ignore[arg-type]
        PerBlock(tuple(block_size)),
        zero_point_domain=ZeroPointDomain.NONE,
        scale_dtype=scale_dtype,
    )
    return AffineQuantizedTensor.from_float(input_float, LinearSpec(spec, layout=_layout))


def to_affine_quantized_floatx_static(
    input_float: Tensor,
    scale: Tensor,
    block_size: Sequence[int],
    target_dtype: torch.dtype | QDType,
    _layout: Layout = PlainLayout(),
) -> AffineQuantizedTensor:
    """Quantize a float tensor to floating-point codes with given scales, one element per block."""
    return to_affine_quantized_intx_static(input_float, scale, None, block_size, target_dtype, _layout=_layout)


def to_affine_quantized_fpx(input_float: Tensor, ebits: int, mbits: int) -> AffineQuantizedTensor:
    """Quantize a float tensor to small floating-point codes, with one scale per row, packed to their true size.

    A code has a sign, `ebits` exponent and `mbits` mantissa bits. torchao takes `(input_float, _layout)` with the bits
    in a `FloatxTensorCoreLayout(ebits, mbits)`; here a layout does not define the format of the codes.

    Raises:
        ValueError: the format is not (3, 2), (2, 3), (2, 2), (3, 1), (2, 1) or (2, 0).
    """
    dtype = qdtype(FloatFormat(ebits, mbits).name)
    spec = QuantSpec(dtype, PerRow(), zero_point_domain=ZeroPointDomain.NONE)
    return AffineQuantizedTensor.from_float(input_float, LinearSpec(spec, layout=PackedLayout()))


def to_linear_activation_quantized(
    weight: AffineQuantizedTensor,
    activation: QuantSpec,
    act_scale: Tensor | None = None,
    act_zero_point: Tensor | None = None,
) -> AffineQuantizedTensor:
    """The same weight, with its input quantized by `activation`: on each call, or with a fixed `act_scale`.

    Raises:
        TypeError: `weight` is not quantized, or `activation` is not a `QuantSpec` (a callable could not be saved,
            compared or compiled).
    """
    if not isinstance(weight, AffineQuantizedTensor):
        raise TypeError(f"to_linear_activation_quantized takes a quantized weight, got {type(weight).__name__}")
    if not isinstance(activation, QuantSpec):
        raise TypeError(f"to_linear_activation_quantized takes a QuantSpec, got {type(activation).__name__}")
    return weight.with_activation(activation, act_scale, act_zero_point)
