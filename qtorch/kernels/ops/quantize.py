"""Quantization of activations by rows (tokens), of keys and values for a cache, and of weights.

    scale[m] = max_k |x[m, k]| / 127,    q[m, k] = round(x[m, k] / scale[m])

A row that holds a NaN or an infinity has a scale that is NaN or infinite; it does not affect the other rows.
"""

import functools

import torch
from torch import Tensor

from ...primitives import MappingType, MinMaxRule, QuantSpec, Rounding, affine, qdtype, rotated_spec, slices, sqnr
from ...primitives.layouts import can_pack_bits, pack_codes
from ..cache_form import CacheForm, Parts
from ..custom_ops import by_device, opaque
from ..registry import QuantizedWeight
from .weight_only_mm import dequantize_codes


@by_device
def quantize_int8_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 in [-127, 127], one fp32 scale per row, of x (M, K) fp32, fp16 or bf16: codes (M, K) int8 and
    scale (M, 1) fp32, equal bit for bit to the primitives on the same spec.

    Raises:
        TypeError: x is not in floating point.
    """
    affine.check_floating_point("quantize_int8_rowwise", x)
    if x.shape[-1] == 0:
        return x.to(torch.int8), x.new_full((*x.shape[:-1], 1), torch.finfo(torch.float32).tiny, dtype=torch.float32)
    scale = affine.quotient(x.abs().amax(-1, keepdim=True).float(), 127.0).clamp(min=torch.finfo(torch.float32).tiny)
    # |x / scale| <= 127 up to rounding, and 127 + rounding error still rounds to 127: there is nothing to clip.
    return torch.round(x * (1.0 / scale)).to(torch.int8), scale


Quantized = tuple[Tensor, Tensor, Tensor | None]


def quantize_input(x: Tensor, weight: QuantizedWeight) -> Quantized:
    """(codes, scale, zero_point) of the input `x` (M, K), quantized as the weight's scheme says, dynamic or static."""
    spec = weight.scheme.activation
    assert spec is not None
    if weight.scheme.spec.static:
        assert weight.act_scale is not None
        return quantize_static(x, spec, weight.act_scale, weight.act_zero_point)
    return quantize_rows(x, spec)


def quantize_static(x: Tensor, spec: QuantSpec, scale: Tensor, zero_point: Tensor | None) -> Quantized:
    """(codes, scale, zero_point) of `x` (M, K) with the given scale. If the code dtype has no NaN, the result has a
    scale per row, NaN for rows that hold a NaN or an infinity."""
    codes = spec.quantize(x, scale, zero_point)
    return codes, *_of_rows(spec, scale, zero_point, None if spec.dtype.has_nan else affine.lost_rows(x))


@by_device
def quantize_rows(x: Tensor, spec: QuantSpec) -> Quantized:
    """`quantize_dynamic` of independent rows: scales that rows share are chosen from the finite rows. The result has a
    scale per row, like that of `quantize_static`."""
    if not x.shape[0] or not shares_scales(spec):
        return quantize_dynamic(x, spec)
    lost = affine.lost_rows(x)
    scale, zero_point = spec.choose_qparams(affine.without_rows(x, lost))
    return spec.quantize(x, scale, zero_point), *_of_rows(spec, scale, zero_point, None if spec.dtype.has_nan else lost)


def without_lost_rows(x: Tensor, spec: QuantSpec) -> Tensor:
    """The values that the scales of `x` (M, K) are chosen from: if rows share scales, non-finite rows are zeroed."""
    return affine.without_rows(x, affine.lost_rows(x)) if x.shape[0] and shares_scales(spec) else x


def shares_scales(spec: QuantSpec) -> bool:
    """Whether the scales of a row of a matrix depend on other rows."""
    return spec.granularity.pattern(2)[0] != 1 or spec.scale_spec is not None


def _of_rows(
    spec: QuantSpec, scale: Tensor, zero_point: Tensor | None, lost: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point for each row, from those of blocks of rows; as they are if no rows can be lost."""
    if lost is None:
        return scale, zero_point
    rows = spec.granularity.pattern(2)[0]
    if rows > 1:
        scale = scale.repeat_interleave(rows, 0)
        zero_point = None if zero_point is None else zero_point.repeat_interleave(rows, 0)
    scale = scale.float() + lost
    return scale, None if zero_point is None else zero_point.expand(scale.shape)


def dequantize_rows(
    spec: QuantSpec, codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The real numbers that `codes` (M, K) stand for; the blocks follow from the shape of the scale."""
    low, high = spec.code_range
    return dequantize_codes(codes, scale, zero_point, spec.dtype, low, high, spec.zero_point_domain, dtype)


@by_device
def quantize_dynamic(x: Tensor, spec: QuantSpec) -> Quantized:
    """(codes, scale, zero_point) of `x` (M, K), its scale chosen from its values: NaN or infinite for a block that
    holds such a value."""
    if is_int8_rowwise(spec):
        return *quantize_int8_rowwise(x), None
    scale, zero_point = spec.choose_qparams(x)
    return spec.quantize(x, scale, zero_point), scale, zero_point


def is_int8_rowwise(spec: QuantSpec) -> bool:
    """Whether `quantize_dynamic` is `quantize_int8_rowwise`."""
    return spec.dtype is qdtype("int8") and spec.code_range == (-127, 127) and is_absmax_rowwise(spec)


def is_absmax_rowwise(spec: QuantSpec) -> bool:
    """Whether a row has one scale, from its largest magnitude, and no zero point."""
    absmax = spec.mapping not in (MappingType.ASYMMETRIC, MappingType.SYMMETRIC_SIGNED)
    return absmax and not spec.has_zero_point and has_default_rows(spec)


def has_default_rows(spec: QuantSpec) -> bool:
    """`has_default_scales`, one for each row."""
    return spec.granularity.pattern(2) == (1, -1) and spec.eps is None and has_default_scales(spec)


def has_default_scales(spec: QuantSpec) -> bool:
    """Whether scales are from the extremes, in fp32, and codes are rounded to nearest."""
    nearest, in_fp32 = spec.rounding is Rounding.NEAREST_EVEN, spec.scale_dtype in (None, torch.float32)
    return nearest and in_fp32 and isinstance(spec.scale_rule, MinMaxRule) and spec.preserve_max_val


@by_device
def quantize_tokens(x: Tensor, form: CacheForm) -> Parts:
    """Codes and scales of tokens (B, H, T, D), one scale a token of a head, in the form of the values; those of the
    primitives bit for bit. A token with a NaN or an infinity has a scale that is NaN, and changes no other token."""
    return _quantize(x, form.values)


def quantize_keys_and_values(keys: Tensor, values: Tensor, form: CacheForm) -> tuple[Parts, Parts]:
    """Codes and scales of keys and values (B, H, T, D), T a multiple of `form.block`. A token with a NaN or an infinity
    has a scale that is NaN, and changes no other token: where tokens share the scales of their keys, the scale of its
    value is NaN."""
    if not form.block:
        return quantize_tokens(keys, form.of_key_tokens), quantize_tokens(values, form)
    highest = keys.abs().amax(-1, keepdim=True).float()
    lost = affine.with_non_finite(torch.zeros_like(highest), highest)
    codes, scale, *zero = quantize_tokens(values, form)
    scale = (scale.float() + lost).to(scale.dtype)
    return _quantize(torch.where(lost == 0, keys, 0), form.keys), (codes, scale, *zero)


def _quantize(x: Tensor, spec: QuantSpec) -> Parts:
    scale, zero_point = spec.choose_qparams(x)
    codes = spec.quantize(x, scale, zero_point)
    codes = pack_codes(codes, spec.dtype) if can_pack_bits(spec.dtype) else codes
    if codes.dtype is not torch.int8:
        codes = codes.view(torch.uint8)  # float8 lacks operations that move codes
    return (codes, scale) if zero_point is None else (codes, scale, zero_point)


@opaque(lambda x: torch.empty_like(x))
def rotate_heads(x: Tensor) -> Tensor:
    """x (..., D) times a Hadamard matrix, D / size blocks of the largest power of two that divides D; in fp32, given in
    x's dtype. Its own inverse, and products of two rotated vectors are those of the vectors: q . k = (q H) . (k H).

    Source: QuaRot, arXiv 2404.00456, section 4.
    """
    width = x.shape[-1]
    return rotated_spec.rotate_blocks(x, _hadamard(width & -width or 1, x.device)).to(x.dtype)


@functools.cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    return rotated_spec.sylvester(size, device, torch.float32)


@by_device
def quantize_weight(weight: Tensor, spec: QuantSpec) -> Quantized:
    """(codes, scale, zero_point) of `weight`, any shape in floating point, as `QuantSpec.choose_qparams` and
    `QuantSpec.quantize` give them, bit for bit, by a spec without a `scale_spec`; one operation, so that a device can
    make both in one pass. A block that holds a NaN or an infinity has NaN for a scale, and its codes are undefined
    unless the code dtype has a NaN."""
    scale, zero_point = spec.choose_qparams(weight)
    return spec.quantize(weight, scale, zero_point), scale, zero_point


@by_device
def error_norms(weight: Tensor, quantized: QuantizedWeight) -> Tensor:
    """(|w|, |w - dequantize(q)|), Euclidean norms of a weight (N, ...) and of what is lost of it, in slices of rows."""
    spec, dtype = quantized.scheme.weight, quantized.scheme.dtype
    codes, scale, other = quantized.plain()
    block = spec.block_size(weight.shape)[0]
    step = max(block, slices.slice_elements() * weight.shape[0] // max(weight.numel(), 1) // block * block)
    # A look-up table that all blocks share is no tensor of rows.
    shared = other is not None and other.dim() < codes.dim()

    def rows(tensor: Tensor | None, start: int) -> Tensor | None:
        if tensor is None or tensor.shape[0] == 1:
            return tensor
        return tensor[start // block : (start + step) // block]

    found = []
    for start in range(0, weight.shape[0], step):
        of_slice = other if shared else rows(other, start)
        part = spec.dequantize(codes[start : start + step], rows(scale, start), of_slice, dtype)  # type: ignore[arg-type]
        found.append(sqnr.norms(weight[start : start + step], part))
    return sqnr.combined_norms(torch.stack(found))
