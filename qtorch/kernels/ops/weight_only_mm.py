"""The product of a floating-point activation and a weight in codes, by dequantizing a slice of the weight at a time.

    y[m, n] = sum_k x[m, k] * dequantize(w)[n, k]

The slice stays in cache, and no full copy of the weight is made. int8 codes with a scale per row are not dequantized
where `fixed_point_mm` accepts the input.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives import QDType, QuantSpec, ZeroPointDomain, affine, dequantize_affine, granularity, qdtype
from .. import custom_ops, features, registry
from .int_matmul import int32_terms, int_matmul

SLICES = 3
MAX_RATIO = 2.0**8  # largest number of a row by the mean magnitude; beyond it the small ones lose precision
LEAST_CODES = 1 << 20  # of a weight; with fewer, the calls take longer than the product (measured)
COLUMNS_PER_ROW = 8  # of the input, at least; with fewer, adding up slices takes longer than the product (measured)


def fixed_point_mm(x: Tensor, codes: Tensor) -> Tensor | None:
    """x times codes, as integer products of torch on a CPU that has fast ones:

        x[m, k] = sum_s xs[m] / 254^s * q[s, m, k],    xs[m] = max_k |x[m, k]| / 127,    q int8
        y[m, n] = sum_s xs[m] / 254^s * (sum_k q[s, m, k] * c[n, k])

    The input is written in fixed point: each slice is the rounded remainder of the slices before it, and three slices
    are as accurate as fp32 is for the largest number of a row. The sums in brackets are exact. The compiled kernels do
    the same (cpu/src/quantize.h). A NaN or an infinity in a row makes its results NaN.

    From x (M, K) fp32 and codes (N, K) int8: (M, N) fp32; None where another method is better: for other dtypes or
    processors, small weights, many rows, and rows in which a few numbers are far larger than the others.
    """
    if x.dtype is not torch.float32 or x.device.type != "cpu" or not x.numel() or not features.cpu_has("vnni"):
        return None
    if codes.numel() < LEAST_CODES or COLUMNS_PER_ROW * x.shape[0] > x.shape[1] or x.shape[1] > int32_terms():
        return None
    size = x.abs()
    high = size.amax(1, keepdim=True)
    lost = high * 0  # NaN for rows that hold a NaN or an infinity
    fits = (high <= MAX_RATIO * size.mean(1, keepdim=True)) & ((high == 0) | (high > 2.0**-90)) | (lost != 0)
    if not bool(fits.all()):
        return None
    custom_ops.note("fixed_point_mm")
    scale = torch.where(high == 0, 1.0, high / 127) + lost
    slices, scales, rest = [], [], x
    for _ in range(SLICES):
        q = (rest / scale).round_()
        rest = rest - q * scale
        slices.append(q.to(torch.int8))
        scales.append(scale)
        scale = scale / 254
    sums = int_matmul(torch.cat(slices), codes.t()).unflatten(0, (SLICES, -1))
    return (sums * torch.stack(scales)).sum(0)


@custom_ops.by_device
def dequantize_codes(
    codes: Tensor, scale: Tensor | None, zero_point: Tensor | None, kind: QDType,
    low: float, high: float, domain: ZeroPointDomain, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`dequantize_affine` of codes (M, K) with bounds `low` and `high`, whose blocks follow from the shape of the
    scale; without a scale, the values of the codes themselves. The result (M, K) is in `dtype`."""
    if scale is None:
        return kind.decode(codes).to(dtype) if kind.format else codes.to(dtype)
    block = granularity.block_of(codes.shape, scale.shape)
    return dequantize_affine(codes, block, scale, zero_point, kind, low, high, domain, dtype)


SLICE_BYTES = {"cpu": 4 << 20}  # of a dequantized slice by device type; elsewhere 64 MiB, enough to fill a GPU
EVEN_ROWS = 128  # matrix products take up to a third longer with slices that are not whole multiples of this
LARGE = 2.0**64  # beyond it, products of the input with codes that are not scaled yet may be infinite


@custom_ops.opaque(lambda x, codes, *_: x.new_empty(x.shape[0], codes.shape[0]))
def weight_only_mm(
    x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None,
    dtype: custom_ops.Name, low: float, high: float, domain: custom_ops.Name,
) -> Tensor:  # fmt: skip
    """The equation above without bias, (M, N) in the dtype of x.

    Args:
        x: (M, K) floating point; the product runs in its dtype.
        codes: (N, K) in the storage dtype of `dtype`, the name of a `QDType`.
        scale, zero_point: one element per block of the weight; the blocks follow from the scale's shape.
        low, high: bounds of the codes.
        domain: name of a `ZeroPointDomain`.
    """
    if dtype == "int8" and zero_point is None and scale.shape == (len(codes), 1):
        y = fixed_point_mm(x, codes)
        if y is not None:
            return y.mul_(scale.t())
    numerics = CodeNumerics(scale, zero_point, qdtype(dtype), low, high, ZeroPointDomain[domain])
    return multiply_codes(x, codes.shape, lambda a, b: codes[a:b], numerics)


def code_arguments(spec: QuantSpec) -> tuple[str, float, float, str]:
    """The last arguments of `weight_only_mm` for codes of this spec: dtype, low, high and domain."""
    low, high = spec.code_range
    return spec.dtype.name, float(low), float(high), spec.zero_point_domain.name


class CodeNumerics(NamedTuple):
    """How the codes of a matrix stand for real numbers; the blocks follow from the shape of the scale."""

    scale: Tensor
    zero_point: Tensor | None
    kind: QDType
    low: float
    high: float
    domain: ZeroPointDomain


def multiply_codes(
    x: Tensor, shape: Sequence[int], read: Callable[[int, int], Tensor], numerics: CodeNumerics, axis: int = -1
) -> Tensor:
    """The equation above for a weight (N, K) of this shape whose codes are read a slice at a time.

    Args:
        read: ``read(start, stop)`` gives the codes of these rows of the weight; with `axis` -2, of its transpose.
    """
    (n, k), (scale, zero_point, kind, low, high, domain) = shape, numerics
    # Scale each result instead of each weight; not in fp16, where the sums of codes could overflow.
    scale_last = axis == -1 and zero_point is None and scale.shape == (n, 1) and x.dtype != torch.float16
    block = (1, k) if scale_last else granularity.block_of(shape, scale.shape)
    if scale_last:
        # A row near the largest number is multiplied with codes as a smaller one, exactly.
        up = registry.power_if_larger(x.abs(), LARGE, LARGE)
        x = x / up
    elif axis != -1:  # work on the transpose, whose rows are contiguous in memory
        block, scale, zero_point = block[::-1], scale.t(), None if zero_point is None else zero_point.t()
    rows, columns = (n, k) if axis == -1 else (k, n)
    step = slice_length(x, columns, block[0])
    # New memory for each slice would not be in cache, and the system would have to clear it first.
    numbers = x.new_empty(min(rows, step), columns, dtype=torch.float32)
    reals = numbers if x.dtype == torch.float32 else x.new_empty(numbers.shape)

    def dequantize(start: int, stop: int) -> Tensor:
        codes, count = read(start, stop), stop - start
        if scale_last and not kind.format:
            return reals[:count].copy_(codes)
        own_scale = None if scale_last else scale_of_slice(scale, start, stop, block[0])
        own_zero = None if zero_point is None else scale_of_slice(zero_point, start, stop, block[0])
        if own_scale is None or kind.format:
            return dequantize_codes(codes, own_scale, own_zero, kind, low, high, domain, x.dtype)
        view = granularity.BlockView(codes.shape, (min(block[0], count), block[1]))
        split = view.split(numbers[:count].copy_(codes))
        split_zero = None if own_zero is None else view.split_scale(own_zero)
        affine.dequantize_split(split, view.split_scale(own_scale), split_zero, (low, high), domain, out=split)
        return numbers[:count] if reals is numbers else reals[:count].copy_(numbers[:count])

    y = multiply_slices(x, n, step, dequantize, axis)
    return y.mul_(scale.t().to(y.dtype)).mul_(up) if scale_last else y


def multiply_slices(x: Tensor, n: int, step: int, dequantize: Callable[[int, int], Tensor], axis: int = -1) -> Tensor:
    """x (M, K) times a weight (N, K) whose numbers are made a slice of `step` rows at a time: (M, N) in the dtype of x.

    Args:
        dequantize: ``dequantize(start, stop)`` gives these rows of the weight; with `axis` -2, of its transpose (K, N).
            Their products are then added up in fp32, because bf16 would round each sum.
    """
    if axis == -1:
        y = x.new_empty(x.shape[0], n)
        for start in range(0, n, step):
            stop = min(start + step, n)
            torch.mm(x, dequantize(start, stop).t(), out=y[:, start:stop])
        return y
    y = x.new_zeros(x.shape[0], n, dtype=torch.float32)
    for start in range(0, x.shape[1], step):
        stop = min(start + step, x.shape[1])
        y += torch.mm(x[:, start:stop], dequantize(start, stop))
    return y.to(x.dtype)


def scale_of_slice(scale: Tensor, start: int, stop: int, block: int) -> Tensor:
    """The scales, or zero points, of the rows from `start` to `stop`, whole blocks of `block` rows, or one for all."""
    return scale if scale.shape[0] == 1 else scale[start // block : stop // block]


def slice_length(x: Tensor, length: int, block: int = 1, limit: int | None = None) -> int:
    """Rows of `length` elements in a dequantized slice for the input `x`, of `limit` bytes: whole blocks, at least one;
    a multiple of `EVEN_ROWS` if there is room for it."""
    limit = SLICE_BYTES.get(x.device.type, 64 << 20) if limit is None else limit
    rows = limit // max(1, length * x.element_size())
    even = math.lcm(block, EVEN_ROWS)
    unit = even if rows >= even else block
    return max(1, rows // unit) * unit
