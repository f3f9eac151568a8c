"""Affine quantization: q = round(x / scale) + zero_point, and back.

Four stages, each usable alone: calibrate (the range of each block), choose the scale and zero point, quantize,
dequantize. Names and argument order are torchao 0.6's. Where torch has the same operation
(`torch.ops.quantized_decomposed.*`, `torch.fake_quantize_per_tensor_affine`, ...), results are equal bit for bit on
fp32.

All arithmetic is in fp32 whatever the dtype of the input. Scales have the rank of the input (see `granularity`).

    domain   quantize                                            dequantize
    INT      clamp(round(x / scale) + zero_point)                (q - zero_point) * scale
    NONE     clamp(round(x / scale))                             q * scale
    FLOAT    clamp(round((x - zero_point) / scale + middle))     (q - middle) * scale + zero_point

with middle = (quant_min + quant_max + 1) / 2; FLOAT is the convention of the tinygemm int4 kernels.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from .granularity import BlockView
from .jsonable import jsonable
from .qdtype import QDType, qdtype
from .rounding import Rounding, round_to_integer


@jsonable
class MappingType(enum.Enum):
    """How a range [min, max] of reals maps to the range of codes.

    SYMMETRIC: zero in the middle; scale = max(-min, max) / ((quant_max - quant_min) / 2).
    SYMMETRIC_NO_CLIPPING_ERR: zero in the middle; scale = max(min / quant_min, max / quant_max), both ends counted from
        the code of zero, so that neither clips although the codes reach one further below zero than above.
    ASYMMETRIC: the ends meet; scale = (max - min) / (quant_max - quant_min).
    """

    SYMMETRIC = "symmetric"
    SYMMETRIC_NO_CLIPPING_ERR = "symmetric_no_clipping_err"
    ASYMMETRIC = "asymmetric"


@jsonable
class ZeroPointDomain(enum.Enum):
    """What a zero point is: a code (INT), a real number (FLOAT), or absent (NONE). Equations at the top of the file."""

    INT = "int"
    FLOAT = "float"
    NONE = "none"


def min_max(input: Tensor, block_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Smallest and largest element of each block, fp32, of the scale's shape; zeros where a block is empty."""
    view = BlockView(input.shape, block_size)
    if input.numel() == 0:
        zeros = torch.zeros(view.scale_shape, dtype=torch.float32, device=input.device)
        return zeros, zeros
    x = view.split(input)
    if not view.dims:
        low = high = x
    elif len(view.dims) == 1:
        low, high = torch.aminmax(x, dim=view.dims[0], keepdim=True)
    else:
        low, high = torch.amin(x, view.dims, keepdim=True), torch.amax(x, view.dims, keepdim=True)
    return low.reshape(view.scale_shape).float(), high.reshape(view.scale_shape).float()


def choose_qparams_affine(
    input: Tensor,
    mapping_type: MappingType,
    block_size: Sequence[int],
    target_dtype: torch.dtype | QDType,
    quant_min: float | None = None,
    quant_max: float | None = None,
    eps: float | None = None,
    scale_dtype: torch.dtype | None = None,
    zero_point_dtype: torch.dtype | None = None,
    preserve_zero: bool = True,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of each block of `input` from its minimum and maximum.

    Arguments and result as in `choose_qparams_affine_with_min_max`.
    """
    low, high = min_max(input, block_size)
    return choose_qparams_affine_with_min_max(
        low,
        high,
        mapping_type,
        block_size,
        target_dtype,
        quant_min,
        quant_max,
        eps,
        scale_dtype or torch.float32,
        zero_point_dtype,
        preserve_zero,
        zero_point_domain,
    )


def choose_qparams_affine_with_min_max(
    min_val: Tensor,
    max_val: Tensor,
    mapping_type: MappingType,
    block_size: Sequence[int],
    target_dtype: torch.dtype | QDType,
    quant_min: float | None = None,
    quant_max: float | None = None,
    eps: float | None = None,
    scale_dtype: torch.dtype | None = None,
    zero_point_dtype: torch.dtype | None = None,
    preserve_zero: bool = True,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point from the range of each block, as an observer records it.

    Args:
        min_val, max_val: range of each block, the scale's shape, finite.
        mapping_type: see `MappingType`.
        block_size: accepted for the common signature; the ranges are per block already.
        target_dtype: gives the range of codes unless `quant_min` / `quant_max` narrow it.
        eps: smallest scale; by default the smallest normal number of `scale_dtype`, so that an all-zero block has a
            finite scale and stays exactly zero while small weights keep their precision.
        scale_dtype: fp32 by default. The scale is rounded to it here, before anything is quantized with it.
        zero_point_dtype: int32 for the INT domain, fp32 for FLOAT.
        preserve_zero: extend the range to include zero, so that 0.0 is a code (FLOAT, asymmetric: is within half a
            step of one). False needs the FLOAT domain.
        zero_point_domain: see `ZeroPointDomain`; NONE gives no zero point.

    Returns:
        (scale, zero_point), zero_point None for the NONE domain.

    Raises:
        ValueError: options that contradict each other.
    """
    low_code, high_code = code_range(target_dtype, quant_min, quant_max)
    _check_options(mapping_type, zero_point_domain, preserve_zero)
    scale_dtype = scale_dtype or torch.float32
    low, high = min_val.float(), max_val.float()
    if preserve_zero:
        low, high = low.clamp(max=0), high.clamp(min=0)

    middle = (high_code + low_code + 1) / 2
    if mapping_type is MappingType.SYMMETRIC:
        scale = torch.maximum(-low, high) / (float(high_code - low_code) / 2)
    elif mapping_type is MappingType.SYMMETRIC_NO_CLIPPING_ERR:
        zero_code = 0 if zero_point_domain is ZeroPointDomain.NONE else int(middle)
        below = low / (low_code - zero_code) if low_code != zero_code else torch.zeros_like(low)
        above = high / (high_code - zero_code) if high_code != zero_code else torch.zeros_like(high)
        scale = torch.maximum(below, above)
    else:
        steps = float(high_code - low_code)
        scale = (high - low) / steps
        # The difference of two huge numbers overflows where that of their quotients does not.
        scale = torch.where(scale.isinf(), high / steps - low / steps, scale)
    limits = torch.finfo(scale_dtype)
    largest = limits.max
    if mapping_type is not MappingType.SYMMETRIC_NO_CLIPPING_ERR:
        # The outermost code may lie half a step beyond the range; it must not stand for infinity.
        largest = min(largest, torch.finfo(torch.bfloat16).max / ((high_code - low_code + 1) / 2))
    scale = scale.clamp(min=max(limits.tiny, eps or 0.0), max=largest).to(scale_dtype)

    if zero_point_domain is ZeroPointDomain.NONE:
        return scale, None
    if zero_point_domain is ZeroPointDomain.FLOAT:
        if mapping_type is MappingType.ASYMMETRIC:
            zero_point = low + scale.float() * (middle - low_code)
        else:
            zero_point = torch.zeros_like(low)
        return scale, zero_point.to(zero_point_dtype or torch.float32)
    if mapping_type is MappingType.ASYMMETRIC:
        zero_point = (low_code - torch.round(low / scale.float())).clamp(low_code, high_code)
    else:
        zero_point = torch.full_like(low, int(middle))
    return scale, zero_point.to(zero_point_dtype or torch.int32)


def quantize_affine(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    output_dtype: torch.dtype | QDType,
    quant_min: float | None = None,
    quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
    *,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Codes of `input`, same shape, in the storage dtype of `output_dtype` (int8 for int1..int8, uint8 for
    uint1..uint8).

    The division by the scale is a multiplication by its fp32 reciprocal, as in torch's own quantizers. NaN has no code:
    what it becomes is undefined.

    Args:
        input: fp32, fp16 or bf16, any shape.
        block_size: elements that share a scale, one size per axis, -1 for a whole axis.
        scale: one element per block.
        zero_point: one element per block, or None for zero.
        output_dtype: type of the codes.
        quant_min, quant_max: narrower bounds than the type's own.
        zero_point_domain: see the equations at the top of the file.
        rounding, generator: see `round_to_integer`; floating-point codes round to nearest even.
    """
    view = BlockView(input.shape, block_size)
    return view.merge(
        _quantize(
            view, input, scale, zero_point, output_dtype, quant_min, quant_max, zero_point_domain, rounding, generator
        )[0].to(qdtype(output_dtype).storage)
    )


def dequantize_affine(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    input_dtype: torch.dtype | QDType,
    quant_min: float | None = None,
    quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Reals of the codes `input`, same shape, in `output_dtype`; computed in fp32.

    Args:
        input: codes in the storage dtype of `input_dtype`.
        block_size, scale, zero_point, input_dtype, quant_min, quant_max, zero_point_domain: as they were quantized
            with.
        output_dtype: a floating-point dtype.

    Raises:
        ValueError: the codes are not in the storage dtype of `input_dtype`.
    """
    storage = qdtype(input_dtype).storage
    if input.dtype != storage:
        raise ValueError(f"codes of {input_dtype} are stored as {storage}, got {input.dtype}")
    view = BlockView(input.shape, block_size)
    codes = view.split(input).float()
    code_bounds = code_range(input_dtype, quant_min, quant_max)
    return view.merge(_dequantize(view, codes, scale, zero_point, code_bounds, zero_point_domain)).to(output_dtype)


def code_range(dtype: torch.dtype | QDType, quant_min: float | None, quant_max: float | None) -> tuple[float, float]:
    """Bounds of the codes: the type's own, narrowed by those given.

    Raises:
        ValueError: the bounds given are empty or leave the type's range.
    """
    kind = qdtype(dtype)
    low = kind.quant_min if quant_min is None else quant_min
    high = kind.quant_max if quant_max is None else quant_max
    if not kind.quant_min <= low < high <= kind.quant_max:
        raise ValueError(
            f"quant_min={low}, quant_max={high} is no range within {kind.name}'s [{kind.quant_min}, {kind.quant_max}]"
        )
    return low, high


def fake_quantize_blocks(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    quant_dtype: torch.dtype | QDType,
    quant_min: float | None,
    quant_max: float | None,
    zero_point_domain: ZeroPointDomain,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize and dequantize without storing codes: (result in the input's dtype, mask of what did not clip)."""
    view = BlockView(input.shape, block_size)
    codes, unclipped = _quantize(
        view, input, scale, zero_point, quant_dtype, quant_min, quant_max, zero_point_domain, rounding, generator
    )
    if qdtype(quant_dtype).is_floating_point:
        codes = codes.to(qdtype(quant_dtype).storage).float()
    bounds = code_range(quant_dtype, quant_min, quant_max)
    real = _dequantize(view, codes, scale, zero_point, bounds, zero_point_domain)
    return view.merge(real).to(input.dtype), view.merge(unclipped)


def _quantize(
    view: BlockView,
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: torch.dtype | QDType,
    quant_min: float | None,
    quant_max: float | None,
    domain: ZeroPointDomain,
    rounding: Rounding,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Codes as fp32 in the split view, and the mask of those that did not clip."""
    low, high = code_range(dtype, quant_min, quant_max)
    x = view.split(input).float()
    s = view.split_scale(scale).float()
    z = None if zero_point is None else view.split_scale(zero_point).float()
    if domain is ZeroPointDomain.FLOAT and z is not None:
        codes = (x - (z - s * ((low + high + 1) / 2))) / s
    else:
        codes = x * (1.0 / s)
    if not qdtype(dtype).is_floating_point:
        codes = round_to_integer(codes, rounding, generator)
    if domain is ZeroPointDomain.INT and z is not None:
        codes = codes + z
    return codes.clamp(low, high), (codes >= low) & (codes <= high)


def _dequantize(
    view: BlockView,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bounds: tuple[float, float],
    domain: ZeroPointDomain,
) -> Tensor:
    """Reals, fp32, of fp32 codes in the split view."""
    s = view.split_scale(scale).float()
    if zero_point is None or domain is ZeroPointDomain.NONE:
        return codes * s
    z = view.split_scale(zero_point).float()
    if domain is ZeroPointDomain.INT:
        return (codes - z) * s
    return (codes - (bounds[0] + bounds[1] + 1) / 2) * s + z


def _check_options(mapping: MappingType, domain: ZeroPointDomain, preserve_zero: bool) -> None:
    if mapping is MappingType.ASYMMETRIC and domain is ZeroPointDomain.NONE:
        raise ValueError("an asymmetric mapping needs a zero point: zero_point_domain is NONE")
    if not preserve_zero and domain is not ZeroPointDomain.FLOAT:
        raise ValueError(f"preserve_zero=False needs zero_point_domain FLOAT, got {domain.name}")
