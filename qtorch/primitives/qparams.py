"""Scale and zero point of each block, from the range of its elements.

    symmetric    scale = max(-min, max) / ((quant_max - quant_min) / 2)
    asymmetric   scale = (max - min) / (quant_max - quant_min),   zero_point = quant_min - round(min / scale)

Ranges are extended to include zero; see `MappingType` and `ZeroPointDomain` for the other cases. Arithmetic is in fp32.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from . import floatx, slices
from .affine import MappingType, ZeroPointDomain, check_floating_point, code_range, quotient, with_non_finite
from .granularity import Block, BlockView, Granularity
from .qdtype import QDType


def min_max(input: Tensor, block_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Smallest and largest element of each block, fp32, in the shape of the scale; zeros if blocks are empty."""
    view = BlockView(input.shape, block_size)
    if input.numel() == 0:
        zeros = torch.zeros(view.scale_shape, dtype=torch.float32, device=input.device)
        return zeros, zeros
    x = view.split(input)
    if not view.dims:
        low = high = x
    elif slices.needs_slices(x) and view.dims[0] > 0:
        # On CPU, `aminmax` of short rows takes three times as long, and reductions of bf16 twice.
        low = slices.in_slices(lambda x: torch.amin(x.float(), view.dims, keepdim=True), x, axes=view.dims[0])
        high = slices.in_slices(lambda x: torch.amax(x.float(), view.dims, keepdim=True), x, axes=view.dims[0])
    elif len(view.dims) == 1:
        low, high = torch.aminmax(x, dim=view.dims[0], keepdim=True)
    else:
        low, high = torch.amin(x, view.dims, keepdim=True), torch.amax(x, view.dims, keepdim=True)
    return low.reshape(view.scale_shape).float(), high.reshape(view.scale_shape).float()


def choose_qparams_affine(
    input: Tensor, mapping_type: MappingType, block_size: Sequence[int], target_dtype: torch.dtype | QDType,
    quant_min: float | None = None, quant_max: float | None = None, eps: float | None = None,
    scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None, preserve_zero: bool = True,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Scale and zero point of each block of `input` from its minimum and maximum.

    Arguments, result and errors are those of `choose_qparams_affine_with_min_max`.
    """
    check_floating_point("choose_qparams_affine", input)
    low, high = min_max(input, block_size)
    dtypes_and_zero = (scale_dtype, zero_point_dtype, preserve_zero, zero_point_domain)
    return choose_qparams_affine_with_min_max(
        low, high, mapping_type, block_size, target_dtype, quant_min, quant_max, eps, *dtypes_and_zero
    )


def choose_qparams_affine_with_min_max(
    min_val: Tensor, max_val: Tensor, mapping_type: MappingType, block_size: Sequence[int],
    target_dtype: torch.dtype | QDType, quant_min: float | None = None, quant_max: float | None = None,
    eps: float | None = None, scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None,
    preserve_zero: bool = True, zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, *,
    preserve_max_val: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Scale and zero point from the range of each block, as an observer records it.

    Args:
        min_val, max_val: range of each block, in the shape of the scale; NaN or infinite ones make the scale NaN.
        mapping_type: see `MappingType`.
        block_size: accepted for compatibility and ignored; the ranges are per block already.
        target_dtype: defines the range of codes, which `quant_min` and `quant_max` can narrow.
        eps: smallest scale, also a subnormal one; by default the smallest normal number of `scale_dtype`, so that an
            all-zero block has a finite scale and stays exactly zero while small weights keep their precision.
        scale_dtype: fp32 by default. The scale is rounded to it before anything is quantized with it;
            `torch.float8_e8m0fnu` gives powers of two (see `_power_of_two_scale`).
        zero_point_dtype: int32 for the INT domain, fp32 for those of real numbers.
        preserve_zero: extend the range to include zero, so that 0.0 has a code (asymmetric with real zero points:
            within half a step). False needs the FLOAT or OFFSET domain.
        zero_point_domain: see `ZeroPointDomain`; NONE gives no zero point.
        preserve_max_val: symmetric: the end of the range is the value of the outermost code; False: it is the far edge
            of that code's bucket, half a step beyond it, scale = max(-min, max) / ((quant_max - quant_min + 1) / 2).

    Returns:
        (scale, zero_point), zero_point None for the NONE domain.

    Raises:
        TypeError: the range is not in floating point.
        ValueError: options that contradict each other.
    """
    for extreme in (min_val, max_val):
        check_floating_point("choose_qparams_affine_with_min_max", extreme)
    low_code, high_code = code_range(target_dtype, quant_min, quant_max)
    check_options(mapping_type, zero_point_domain, preserve_zero, preserve_max_val)
    scale_dtype = scale_dtype or torch.float32
    low, high = min_val.float(), max_val.float()
    if preserve_zero:
        low, high = low.clamp(max=0), high.clamp(min=0)

    middle = (high_code + low_code + 1) / 2
    if mapping_type is MappingType.SYMMETRIC:
        steps = float(high_code - low_code + (not preserve_max_val)) / 2 if high_code else -low_code  # no code above 0
        scale = quotient(torch.maximum(-low, high), steps)
    elif mapping_type is MappingType.SYMMETRIC_NO_CLIPPING_ERR:
        zero_code = 0 if zero_point_domain is ZeroPointDomain.NONE else int(middle)
        below = quotient(low, low_code - zero_code) if low_code != zero_code else torch.zeros_like(low)
        above = quotient(high, high_code - zero_code) if high_code != zero_code else torch.zeros_like(high)
        scale = torch.maximum(below, above)
    elif mapping_type is MappingType.SYMMETRIC_SIGNED:
        zero_code = 0 if zero_point_domain is ZeroPointDomain.NONE else int(middle)
        scale = quotient(torch.where(high > -low, high, low), low_code - zero_code or high_code)
    else:
        steps = float(high_code - low_code)
        scale = quotient(high - low, steps)
        # The difference of two huge numbers may overflow, that of their quotients does not.
        scale = torch.where(scale.isinf(), quotient(high, steps) - quotient(low, steps), scale)
    limits = torch.finfo(scale_dtype)
    largest = limits.max
    if mapping_type is not MappingType.SYMMETRIC_NO_CLIPPING_ERR:
        # The outermost code may lie half a step beyond the range; it must not dequantize to infinity.
        largest = min(largest, torch.finfo(torch.bfloat16).max / ((high_code - low_code + 1) / 2))
    if zero_point_domain is ZeroPointDomain.OFFSET:
        # The product of a code and the scale must not be infinite; ranges that would need more clip.
        largest = min(largest, torch.finfo(torch.bfloat16).max / max(-low_code, high_code))
    if scale_dtype is torch.float8_e8m0fnu:
        scale = _power_of_two_scale(scale, low, high, high_code, mapping_type)
    # Its reciprocal has to be finite in fp32, too.
    smallest = limits.tiny if eps is None else max(eps, limits.tiny * limits.eps, torch.finfo(torch.float32).tiny)
    if mapping_type is MappingType.SYMMETRIC_SIGNED:
        scale = torch.copysign(scale.abs().clamp(min=smallest, max=largest), scale)
    else:
        scale = scale.clamp(min=smallest, max=largest)
    scale = with_non_finite(with_non_finite(scale, low.detach()), high.detach()).to(scale_dtype)

    if zero_point_domain is ZeroPointDomain.NONE:
        return scale, None
    if zero_point_domain.is_real:
        zero_point = _real_zero_point(scale.float(), low, low_code, middle, mapping_type, zero_point_domain)
        dtype = zero_point_dtype or torch.float32
        most = torch.finfo(dtype).max
        return scale, zero_point.clamp(-most, most).to(dtype)
    if mapping_type is MappingType.ASYMMETRIC:
        zero_point = (low_code - torch.round(low / scale.float())).clamp(low_code, high_code)
    else:
        zero_point = torch.full_like(low, int(middle))
    return scale, zero_point.to(zero_point_dtype or torch.int32)


def _real_zero_point(
    scale: Tensor, low: Tensor, low_code: float, middle: float, mapping: MappingType, domain: ZeroPointDomain
) -> Tensor:
    """Zero points that are real numbers: asymmetric, `low` is at `low_code`; symmetric, zero is at `middle`."""
    asymmetric = mapping is MappingType.ASYMMETRIC
    if domain is ZeroPointDomain.FRACTIONAL:
        return low_code - low / scale if asymmetric else torch.full_like(low, int(middle))
    if domain is ZeroPointDomain.FLOAT:
        return low + scale * (middle - low_code) if asymmetric else torch.zeros_like(low)
    return low - scale * low_code if asymmetric else -scale * int(middle)


def _power_of_two_scale(scale: Tensor, low: Tensor, high: Tensor, high_code: float, mapping: MappingType) -> Tensor:
    """Round scales to powers of two. Symmetric: 2^(floor(log2(absmax)) - floor(log2(high_code))), OCP Microscaling
    specification v1.0, section 6.3; absmax may clip, by less than the last binade of the largest code. Asymmetric: the
    next power of two, without clipping."""
    if mapping is not MappingType.ASYMMETRIC:
        largest_power = 2.0 ** (math.frexp(high_code)[1] - 1)
        return floatx.floor_to_power_of_two(torch.maximum(-low, high)) / largest_power
    floor = floatx.floor_to_power_of_two(scale)
    return torch.where(floor < scale, floor * 2, floor)


def check_options(mapping: MappingType, domain: ZeroPointDomain, preserve_zero: bool, preserve_max_val: bool) -> None:
    """Raise `ValueError` for options that contradict each other."""
    if not preserve_max_val and mapping is not MappingType.SYMMETRIC:
        raise ValueError(f"preserve_max_val=False is for symmetric mappings, got {mapping.name}")
    if mapping is MappingType.ASYMMETRIC and domain is ZeroPointDomain.NONE:
        raise ValueError("an asymmetric mapping needs a zero point: zero_point_domain is NONE")
    if not preserve_zero and not domain.adds_zero_point:
        raise ValueError(f"preserve_zero=False needs the FLOAT or OFFSET domain, got {domain.name}")


N = TypeVar("N", bound="Numerics")


class Numerics(Protocol):
    """The part of `QuantSpec` that scale rules and double quantization need, which that file imports; see there."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def dtype(self) -> QDType: ...
    @property
    def granularity(self) -> Granularity: ...
    @property
    def mapping(self) -> MappingType: ...
    @property
    def zero_point_domain(self) -> ZeroPointDomain: ...
    @property
    def code_range(self) -> tuple[float, float]: ...
    @property
    def has_zero_point(self) -> bool: ...
    @property
    def scale_spec(self) -> "Numerics | None": ...
    @property
    def scale_dtype(self) -> torch.dtype | None: ...
    def block_size(self, shape: Sequence[int]) -> Block: ...
    def choose_qparams(self, input: Tensor) -> tuple[Tensor, Tensor | None]: ...
    def choose_qparams_from_range(
        self, min_val: Tensor, max_val: Tensor, input_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor | None]: ...
    def quantize(self, input: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor: ...
    def dequantize(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor: ...
    def with_granularity(self: N, granularity: Granularity) -> N: ...
    def to_nearest(self: N) -> N: ...
