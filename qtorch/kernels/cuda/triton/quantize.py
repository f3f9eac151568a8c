"""Quantization of rows to int8 or float8: absmax, scale and codes, reading the input once where a row fits a program.

    scale[m] = max(max_k |x[m, k]| / L, tiny),    q[m, k] = round(x[m, k] * (1 / scale[m]))

L is 127 for int8, the largest finite value for float8. Division, multiplication and rounding are those of the
primitives, to the bit. With a seed, rounding is stochastic, q = floor(v) + (u < v - floor(v)), u from Philox (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) at (seed, k, m): the same on every GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...custom_ops import note
from .launch import FLOATS, check_device, check_matrix, check_seed

TINY = torch.finfo(torch.float32).tiny

LARGEST = {
    torch.int8: 127.0,
    torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max,
    torch.float8_e5m2: torch.finfo(torch.float8_e5m2).max,
}
"""The largest code of each dtype; codes are symmetric."""

WHOLE_ROW = 16384
"""Longest row that one program holds in registers."""


@triton.jit
def magnitude_bits(x):
    """Bits of |x| as int32: ordered as the numbers are, with NaN above infinity, so that a maximum keeps NaN."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits, LARGEST: tl.constexpr, TINY: tl.constexpr):
    """The scale of a block whose largest `magnitude_bits` are these."""
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), LARGEST)
    return tl.where(scale < TINY, TINY, scale)  # false for NaN, which stays


@triton.jit
def codes_of(x, inverse, row, column, seed_ptr, LARGEST: tl.constexpr, STOCHASTIC: tl.constexpr, dtype: tl.constexpr):
    """Codes of x; `inverse` is 1 / scale; `row` and `column`, of the shape of x, number the random draws."""
    v = x.to(tl.float32) * inverse
    if dtype == tl.int8:
        if STOCHASTIC:
            floor = tl.floor(v)
            noise, _, _, _ = tl.philox(tl.load(seed_ptr), column, row, column * 0, column * 0)
            v = floor + tl.where(tl.uint_to_uniform_float(noise) < v - floor, 1.0, 0.0)
        else:
            # To nearest, ties to even: below 2^22 this leaves no bits of a fraction. No FMA may join it to the product.
            v = (v + 12582912.0) - 12582912.0
    else:
        v = tl.where(v > LARGEST, LARGEST, tl.where(v < -LARGEST, -LARGEST, v))
    return v.to(dtype)


@triton.jit
def _quantize_rows(
    x_ptr, q_ptr, t_ptr, scale_ptr, seed_ptr, M, K, stride_xm, stride_xk,
    LARGEST: tl.constexpr, TINY: tl.constexpr, STOCHASTIC: tl.constexpr, TRANSPOSED: tl.constexpr,
    ONE_PASS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_K)
    inside = rows[:, None] < M
    x_ptrs = x_ptr + rows[:, None] * stride_xm
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    number = rows[:, None].to(tl.int32) + columns[None, :] * 0
    if ONE_PASS:
        mask = inside & (columns[None, :] < K)
        x = tl.load(x_ptrs + columns[None, :].to(tl.int64) * stride_xk, mask=mask, other=0.0)
        scale = scale_of(tl.max(magnitude_bits(x), 1), LARGEST, TINY)
        inverse = tl.div_rn(1.0, scale)[:, None]
        q = codes_of(x, inverse, number, columns[None, :] + number * 0, seed_ptr, LARGEST, STOCHASTIC, dtype)
        tl.store(q_ptr + rows[:, None] * K + columns[None, :], q, mask=mask)
    else:
        bits = tl.zeros([ROWS, BLOCK_K], tl.int32)
        for k in range(0, K, BLOCK_K):
            at = k + columns[None, :]
            x = tl.load(x_ptrs + at.to(tl.int64) * stride_xk, mask=inside & (at < K), other=0.0)
            bits = tl.maximum(bits, magnitude_bits(x))
        scale = scale_of(tl.max(bits, 1), LARGEST, TINY)
        inverse = tl.div_rn(1.0, scale)[:, None]
        for k in range(0, K, BLOCK_K):
            at = k + columns[None, :]
            mask = inside & (at < K)
            x = tl.load(x_ptrs + at.to(tl.int64) * stride_xk, mask=mask, other=0.0)
            q = codes_of(x, inverse, number, at + number * 0, seed_ptr, LARGEST, STOCHASTIC, dtype)
            tl.store(q_ptr + rows[:, None] * K + at, q, mask=mask)
            if TRANSPOSED:
                tl.store(t_ptr + at.to(tl.int64) * M + rows[:, None], q, mask=mask)
    tl.store(scale_ptr + rows, scale, mask=rows < M)


def _warps(elements: int) -> int:
    """Of a program that holds this many elements in registers."""
    return max(1, min(16, elements // 512))


def quantize_rowwise(
    x: Tensor, dtype: torch.dtype = torch.int8, seed: Tensor | None = None, transposed: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One scale a row; equation at the top of the file.

    Args:
        x: (M, K) fp32, fp16 or bf16, any strides.
        dtype: of the codes: int8, float8_e4m3fn or float8_e5m2.
        seed: int64 (1,) on the device of x, for stochastic rounding (int8 only); a tensor, so that a CUDA graph draws
            anew on each replay.
        transposed: also write the codes as (K, M), for a product that contracts over rows.

    Returns:
        codes (M, K), scale (M, 1) fp32, transposed codes (K, M) or None.
    """
    _check("quantize_rowwise", x, dtype, seed)
    m, k = x.shape
    q, scale = x.new_empty(m, k, dtype=dtype), x.new_full((m, 1), TINY, dtype=torch.float32)
    t = x.new_empty(k, m, dtype=dtype) if transposed else None
    if x.numel():
        one_pass = k <= WHOLE_ROW and not transposed
        block = triton.next_power_of_2(k) if one_pass else 128 if transposed else 4096
        rows = 64 if transposed else max(1, 1024 // block)
        _quantize_rows[(triton.cdiv(m, rows),)](
            x, q, q if t is None else t, scale, scale if seed is None else seed, m, k, *x.stride(),
            LARGEST[dtype], TINY, seed is not None, transposed, one_pass, rows, block,
            num_warps=8 if transposed else _warps(rows * block), enable_fp_fusion=False,
        )  # fmt: skip
    return q, scale, t


def _check(op: str, x: Tensor, dtype: torch.dtype, seed: Tensor | None) -> None:
    check_matrix(op, "x", x, FLOATS)
    if dtype not in LARGEST:
        raise ValueError(f"{op}: codes are int8, float8_e4m3fn or float8_e5m2, got {dtype}")
    if seed is not None:
        if dtype != torch.int8:
            raise ValueError(f"{op}: stochastic rounding gives int8, got {dtype}")
        check_seed(op, seed)
    check_device(op, x=x, seed=seed)
    note(f"triton.{op}")


# Quantization of rows to int8 with a zero point, in one pass over the input.
#
#     scale[m] = max((high - low) / 255, tiny),      low = min(min_k x[m, k], 0), high = max(max_k x[m, k], 0)
#     zero[m]  = -128 - round(low / scale),          q[m, k] = clamp(round(x[m, k] * (1 / scale)) + zero, -128, 127)
#
# To the bit what the primitives give for an asymmetric mapping onto int8; NaN is the scale of a row that holds a NaN or
# an infinity.


LARGEST_SCALE = torch.finfo(torch.bfloat16).max / 128
"""The outermost code may lie half a step beyond the range; it must not stand for infinity."""


@triton.jit
def _round(x):
    # To nearest, ties to even, of numbers below 2^22.
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quantize_rows_asymmetric(
    x_ptr, q_ptr, scale_ptr, zero_ptr, M, K, stride_xm, stride_xk, TINY: tl.constexpr, LARGEST_SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_K).to(tl.int64)
    mask = (rows[:, None] < M) & (columns[None, :] < K)
    x = tl.load(x_ptr + rows[:, None] * stride_xm + columns[None, :] * stride_xk, mask=mask, other=0.0).to(tl.float32)
    low, high = tl.minimum(tl.min(x, 1), 0.0), tl.maximum(tl.max(x, 1), 0.0)
    scale = tl.div_rn(high - low, 255.0)
    # The difference of two huge numbers overflows where that of their quotients does not.
    scale = tl.where(scale == float("inf"), tl.div_rn(high, 255.0) - tl.div_rn(low, 255.0), scale)
    scale = tl.minimum(tl.maximum(scale, TINY), LARGEST_SCALE)
    zero = -128.0 - _round(tl.div_rn(low, scale))
    zero = tl.minimum(tl.maximum(zero, -128.0), 127.0)
    # Bits of infinity; those of NaN are above.
    lost = tl.max(magnitude_bits(x), 1) >= 0x7F800000
    scale = tl.where(lost, float("nan"), scale)
    q = _round(x * tl.div_rn(1.0, scale)[:, None]) + zero[:, None]
    q = tl.minimum(tl.maximum(q, -128.0), 127.0)
    tl.store(q_ptr + rows[:, None] * K + columns[None, :], q.to(tl.int8), mask=mask)
    tl.store(scale_ptr + rows, scale, mask=rows < M)
    tl.store(zero_ptr + rows, zero.to(tl.int8), mask=rows < M)


def quantize_rowwise_asymmetric(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (M, K) int8, scale (M, 1) fp32 and zero point (M, 1) int8 of x (M, K) with any strides, K at most 16384."""
    op = "quantize_rowwise_asymmetric"
    _check(op, x, torch.int8, None)
    m, k = x.shape
    if k > WHOLE_ROW:
        raise ValueError(f"{op} takes rows of at most {WHOLE_ROW} elements, got shape {(m, k)}")
    q, scale = x.new_empty(m, k, dtype=torch.int8), x.new_full((m, 1), TINY, dtype=torch.float32)
    zero = x.new_full((m, 1), -128, dtype=torch.int8)
    if x.numel():
        block = triton.next_power_of_2(k)
        rows = max(1, 1024 // block)
        _quantize_rows_asymmetric[(triton.cdiv(m, rows),)](
            x, q, scale, zero, m, k, *x.stride(), TINY, LARGEST_SCALE, rows, block,
            num_warps=_warps(rows * block), enable_fp_fusion=False,
        )  # fmt: skip
    return q, scale, zero


# Quantization of columns to int8 or float8: one scale a column, the codes written transposed.
#
#     scale[k] = max(max_m |x[m, k]| / L, tiny),    q[k, m] = round(x[m, k] * (1 / scale[k]))
#
# This is what the gradient of a weight wants: it contracts over rows, and an int8 product on Hopper wants its
# operands with the contracted axis last. Two launches, so that a tall matrix fills the GPU: maxima of chunks of rows,
# then codes.


CHUNKS = 16
"""Parts of a column whose maxima are taken in parallel."""


@triton.jit
def _column_maxima(x_ptr, bits_ptr, M, K, stride_xm, stride_xk, chunk, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    columns = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    first = tl.program_id(1).to(tl.int64) * chunk
    bits = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
    for m in range(0, chunk, BLOCK_M):
        rows = first + m + tl.arange(0, BLOCK_M)
        mask = (rows[:, None] < M) & (columns[None, :] < K)
        x = tl.load(x_ptr + rows[:, None] * stride_xm + columns[None, :] * stride_xk, mask=mask, other=0.0)
        bits = tl.maximum(bits, magnitude_bits(x))
    tl.store(bits_ptr + tl.program_id(1) * K + columns, tl.max(bits, 0), mask=columns < K)


@triton.jit
def _quantize_columns(
    x_ptr, bits_ptr, q_ptr, scale_ptr, seed_ptr, M, K, stride_xm, stride_xk, chunks,
    LARGEST: tl.constexpr, TINY: tl.constexpr, STOCHASTIC: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    part = tl.arange(0, CHUNKS)
    parts = (part[:, None] < chunks) & (columns[None, :] < K)
    bits = tl.load(bits_ptr + part[:, None] * K + columns[None, :], mask=parts, other=0)
    scale = scale_of(tl.max(bits, 0), LARGEST, TINY)
    mask = (rows[:, None] < M) & (columns[None, :] < K)
    x = tl.load(x_ptr + rows[:, None] * stride_xm + columns[None, :] * stride_xk, mask=mask, other=0.0)
    at = rows[:, None].to(tl.int32) + tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
    number = columns[None, :].to(tl.int32) + tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
    inverse = tl.div_rn(1.0, scale)[None, :]
    q = codes_of(x, inverse, number, at, seed_ptr, LARGEST, STOCHASTIC, q_ptr.dtype.element_ty)
    tl.store(q_ptr + columns[None, :] * M + rows[:, None], q, mask=mask)
    # The programs of the first rows write the scales.
    tl.store(scale_ptr + columns, scale, mask=columns < tl.where(tl.program_id(0) == 0, K, 0))


def quantize_columnwise(
    x: Tensor, dtype: torch.dtype = torch.int8, seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes (K, M) and scale (K, 1) fp32, one a column; `quantize_rowwise` of the transpose, to the bit."""
    _check("quantize_columnwise", x, dtype, seed)
    m, k = x.shape
    q, scale = x.new_empty(k, m, dtype=dtype), x.new_full((k, 1), TINY, dtype=torch.float32)
    if x.numel():
        block_m, block_k = 64, 64
        chunks = min(CHUNKS, triton.cdiv(m, block_m))
        chunk = triton.cdiv(m, chunks)
        bits = x.new_empty(chunks, k, dtype=torch.int32)
        _column_maxima[(triton.cdiv(k, block_k), chunks)](
            x, bits, m, k, *x.stride(), chunk, block_m, block_k, num_warps=4
        )
        _quantize_columns[(triton.cdiv(m, block_m), triton.cdiv(k, block_k))](
            x, bits, q, scale, scale if seed is None else seed, m, k, *x.stride(), chunks,
            LARGEST[dtype], TINY, seed is not None, CHUNKS, block_m, block_k, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return q, scale


# Quantization in tiles: one scale for each R x C block of a matrix.
#
# scale[i, j] = max(max |x| / L, tiny) over the block (i, j),    q[m, k] = round(x[m, k] * (1 / scale[m / R, k / C]))
#
# 1 x 128 for activations and 128 x 128 for weights (DeepSeek-V3, arXiv 2412.19437, section 3.3.2), 32 x 32 for both
# (JetFire, arXiv 2403.12422, section 4), 1 x group for grouped weights.


@triton.jit
def _quantize_tiles(
    x_ptr, q_ptr, scale_ptr, seed_ptr, M, K, stride_xm, stride_xk,
    LARGEST: tl.constexpr, TINY: tl.constexpr, STOCHASTIC: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # A program has TILES blocks, one below the other: axes (block, row, column).
    block = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    row = tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_C)
    rows = block[:, None, None] * R + row[None, :, None]
    columns = tl.program_id(1).to(tl.int64) * C + column[None, None, :]
    mask = (row[None, :, None] < R) & (rows < M) & (column[None, None, :] < C) & (columns < K)
    x = tl.load(x_ptr + rows * stride_xm + columns * stride_xk, mask=mask, other=0.0)
    scale = scale_of(tl.max(tl.max(magnitude_bits(x), 2), 1), LARGEST, TINY)
    inverse = tl.div_rn(1.0, scale)[:, None, None]
    zeros = tl.zeros([TILES, BLOCK_R, BLOCK_C], tl.int32)
    number, at = rows.to(tl.int32) + zeros, columns.to(tl.int32) + zeros
    q = codes_of(x, inverse, number, at, seed_ptr, LARGEST, STOCHASTIC, q_ptr.dtype.element_ty)
    tl.store(q_ptr + rows * K + columns, q, mask=mask)
    tl.store(scale_ptr + block * tl.num_programs(1) + tl.program_id(1), scale, mask=block * R < M)


def quantize_tilewise(
    x: Tensor, tile: tuple[int, int], dtype: torch.dtype = torch.int8, seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes (M, K) and scale (M / R, K / C) fp32, one a tile (R, C) of at most 16384 elements; else as
    `quantize_rowwise`."""
    _check("quantize_tilewise", x, dtype, seed)
    (m, k), (r, c) = x.shape, tile
    if r < 1 or c < 1 or m % r or k % c or r * c > 16384:
        raise ValueError(
            f"quantize_tilewise: tiles of {r} x {c} must divide the matrix and have at most 16384 elements, x has "
            f"shape {(m, k)}"
        )
    q, scale = x.new_empty(m, k, dtype=dtype), x.new_empty(m // r, k // c, dtype=torch.float32)
    if x.numel():
        block_r, block_c = triton.next_power_of_2(r), triton.next_power_of_2(c)
        tiles = max(1, 2048 // (block_r * block_c))
        _quantize_tiles[(triton.cdiv(m // r, tiles), k // c)](
            x, q, scale, scale if seed is None else seed, m, k, *x.stride(), LARGEST[dtype], TINY, seed is not None,
            r, c, tiles, block_r, block_c, num_warps=4 if block_r * block_c <= 4096 else 8, enable_fp_fusion=False,
        )  # fmt: skip
    return q, scale
