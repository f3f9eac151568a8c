"""Linear with a quantized weight and a floating-point activation, by dequantizing a slice of the weight at a time.

    y[m, n] = sum_k x[m, k] * dequantize(w)[n, k] + bias[n]

The slice stays in cache, and no full copy of the weight is made. int8 codes with a scale per row are not dequantized
where `fixed_point_mm` accepts the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...primitives.affine import ZeroPointDomain, dequantize_affine, dequantize_split
from ...primitives.granularity import Block, BlockView, block_of
from ...primitives.qdtype import QDType, qdtype
from .. import features
from ..custom_ops import by_device, note, opaque
from ..registry import power_if_larger
from .int_matmul import int32_terms, int_matmul

# --------------------------------------------------------------------------------------------------
# A floating-point activation times int8 codes as integer products of torch, on a CPU that has fast ones.
#
#     x[m, k] = sum_s xs[m] / 254^s * q[s, m, k],    xs[m] = max_k |x[m, k]| / 127,    q int8
#     y[m, n] = sum_s xs[m] / 254^s * (sum_k q[s, m, k] * c[n, k])
#
# The input is written in fixed point: each slice is the rounded remainder of the slices before it. The sums in brackets
# are exact. Three slices are as accurate as fp32 is for the largest number of a row. The compiled kernels do the same
# (cpu/src/quantize.h). The weight is not converted.


SLICES = 3

MAX_RATIO = 2.0**8
"""Most that the largest number of a row may exceed the mean magnitude; beyond it the small ones lose precision."""

LEAST_CODES = 1 << 20
"""Least codes of a weight; with fewer, the calls take longer than the product (measured)."""

COLUMNS_PER_ROW = 8
"""Least columns per row of the input; with fewer, adding up slices takes longer than the product (measured)."""


def fixed_point_mm(x: Tensor, codes: Tensor) -> Tensor | None:
    """The equation above, or None where another method is better: for other dtypes or processors, small weights, many
    rows, and rows in which a few numbers are far larger than the others. A NaN or an infinity in a row makes its
    results NaN.

    Args:
        x: (M, K) fp32.
        codes: (N, K) int8.

    Returns:
        (M, N) fp32.
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
    note("fixed_point_mm")
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


# --------------------------------------------------------------------------------------------------
# The real numbers of a matrix of codes.


@by_device
def dequantize_codes(
    codes: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    kind: QDType,
    low: float,
    high: float,
    domain: ZeroPointDomain,
    dtype: torch.dtype,
) -> Tensor:
    """`dequantize_affine` of codes (M, K), whose blocks follow from the shape of the scale; without a scale, the values
    of the codes themselves.

    Args:
        kind: of the codes, whose bounds are `low` and `high`.
        dtype: of the result, (M, K).
    """
    if scale is None:
        return kind.decode(codes).to(dtype) if kind.format else codes.to(dtype)
    block = block_of(codes.shape, scale.shape)
    return dequantize_affine(codes, block, scale, zero_point, kind, low, high, domain, dtype)


SLICE_BYTES = {"cpu": 4 << 20}
"""Size of a dequantized slice by device type; elsewhere 64 MiB, enough to fill a GPU."""

EVEN_ROWS = 128
"""Matrix products take up to a third longer with slices that are not whole multiples of this."""

LARGE = 2.0**64
"""Beyond it, products of the input with codes that are not scaled yet may be infinite."""


@opaque(lambda x, codes, *_: x.new_empty(x.shape[0], codes.shape[0]))
def weight_only_mm(
    x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: str, low: float, high: float, domain: str
) -> Tensor:
    """The equation above without bias.

    Args:
        x: (M, K) floating point; the product runs in its dtype.
        codes: (N, K) in the storage dtype of `dtype`, the name of a `QDType`.
        scale, zero_point: one element per block of the weight; the blocks follow from the scale's shape.
        low, high: bounds of the codes.
        domain: name of a `ZeroPointDomain`.

    Returns:
        (M, N) in the dtype of x.
    """
    if dtype == "int8" and zero_point is None and scale.shape == (len(codes), 1):
        y = fixed_point_mm(x, codes)
        if y is not None:
            return y.mul_(scale.t())
    return multiply_slices(x, codes.shape, lambda a, b: codes[a:b], scale, zero_point, qdtype(dtype), low, high, domain)


def multiply_slices(
    x: Tensor,
    shape: Sequence[int],
    rows: Callable[[int, int], Tensor],
    scale: Tensor,
    zero_point: Tensor | None,
    kind: QDType,
    low: float,
    high: float,
    domain: str,
) -> Tensor:
    """The equation above for a weight of this shape whose codes are read by ``rows(start, stop)``, a slice at a time.

    `stop` may lie beyond the last row. Where the codes come from does not change the result.
    """
    n, k = shape
    y = x.new_empty(x.shape[0], n)
    # Scale each result instead of each weight; not in fp16, where the sums of codes could overflow.
    scale_last = zero_point is None and scale.shape == (n, 1) and x.dtype != torch.float16
    if scale_last:
        # A row near the largest number is multiplied with codes as a smaller one, exactly.
        up = power_if_larger(x.abs(), LARGE, LARGE)
        x = x / up
    block = (1, k) if scale_last else block_of(shape, scale.shape)
    step = slice_length(x, k, block[0])
    memory = SliceMemory(x, min(n, step), k)
    for start in range(0, n, step):
        part = rows(start, start + step)
        if scale_last:
            if kind.format:
                weight = dequantize_codes(part, None, None, kind, low, high, ZeroPointDomain[domain], x.dtype)
            else:
                weight = memory.reals[: len(part)].copy_(part)
        else:
            weight = dequantize_slice(
                part, start, start + step, block, scale, zero_point, kind, low, high, domain, x.dtype, memory
            )
        torch.mm(x, weight.t(), out=y[:, start : start + step])
    return y.mul_(scale.t().to(y.dtype)).mul_(up) if scale_last else y


class SliceMemory:
    """Where the slices of a weight are dequantized, one after the other. Memory that is new for each of them would not
    be in cache, and the system would have to clear it first.

    Attributes:
        numbers: (rows, columns) fp32.
        reals: the same in the dtype of x, rounded; it may be `numbers`.
    """

    def __init__(self, x: Tensor, rows: int, columns: int) -> None:
        self.numbers = x.new_empty(rows, columns, dtype=torch.float32)
        self.reals = self.numbers if x.dtype == torch.float32 else x.new_empty(rows, columns)

    def rounded(self, rows: int) -> Tensor:
        """The reals of the first `rows` rows of `numbers`."""
        reals, numbers = self.reals[:rows], self.numbers[:rows]
        return reals if self.reals is self.numbers else reals.copy_(numbers)


def dequantize_slice(
    part: Tensor,
    start: int,
    stop: int,
    block: Block,
    scale: Tensor,
    zero_point: Tensor | None,
    kind: QDType,
    low: float,
    high: float,
    domain: str,
    dtype: torch.dtype,
    memory: SliceMemory | None = None,
) -> Tensor:
    """Reals of `part`, the codes of the rows from `start` to `stop` of a matrix quantized in blocks of `block`; in
    `memory`, until the next slice, if it is given."""
    of_slice = slice(start // block[0], stop // block[0]) if scale.shape[0] > 1 else slice(None)
    scale, zero_point = scale[of_slice], None if zero_point is None else zero_point[of_slice]
    if memory is None or kind.format:
        return dequantize_codes(part, scale, zero_point, kind, low, high, ZeroPointDomain[domain], dtype)
    view = BlockView(part.shape, (min(block[0], part.shape[0]), block[1]))
    numbers = view.split(memory.numbers[: len(part)].copy_(part))
    zero = None if zero_point is None else view.split_scale(zero_point)
    dequantize_split(numbers, view.split_scale(scale), zero, (low, high), ZeroPointDomain[domain], out=numbers)
    return memory.rounded(len(part))


def slice_length(x: Tensor, length: int, block: int = 1, limit: int | None = None) -> int:
    """Rows of `length` elements in a dequantized slice for the input `x`, of `limit` bytes: whole blocks, at least one;
    a multiple of `EVEN_ROWS` if there is room for it."""
    limit = SLICE_BYTES.get(x.device.type, 64 << 20) if limit is None else limit
    rows = limit // max(1, length * x.element_size())
    even = math.lcm(block, EVEN_ROWS)
    unit = even if rows >= even else block
    return max(1, rows // unit) * unit
