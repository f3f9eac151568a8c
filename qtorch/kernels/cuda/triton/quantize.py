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
from .arguments import FLOATS, check_device, check_matrix, next_power_of_two

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

    Raises:
        ValueError: another dtype or shape.
    """
    check_input("quantize_rowwise", x, dtype, seed)
    m, k = x.shape
    q, scale = x.new_empty(m, k, dtype=dtype), x.new_full((m, 1), TINY, dtype=torch.float32)
    t = x.new_empty(k, m, dtype=dtype) if transposed else None
    note("triton.quantize_rowwise")
    if x.numel():
        one_pass = k <= WHOLE_ROW and not transposed
        block = next_power_of_two(k) if one_pass else 128 if transposed else 4096
        rows = 64 if transposed else max(1, 1024 // block)
        _quantize_rows[(triton.cdiv(m, rows),)](
            x, q, q if t is None else t, scale, scale if seed is None else seed, m, k, *x.stride(),
            LARGEST[dtype], TINY, seed is not None, transposed, one_pass, rows, block,
            num_warps=8 if transposed else max(1, min(16, rows * block // 512)), enable_fp_fusion=False,
        )  # fmt: skip
    return q, scale, t


def check_input(op: str, x: Tensor, dtype: torch.dtype, seed: Tensor | None) -> None:
    """What the quantizers of this package take.

    Raises:
        ValueError: something else.
    """
    check_matrix(op, "x", x, FLOATS)
    if dtype not in LARGEST:
        raise ValueError(f"{op}: codes are int8, float8_e4m3fn or float8_e5m2, got {dtype}")
    if seed is not None:
        if dtype != torch.int8:
            raise ValueError(f"{op}: stochastic rounding gives int8, got {dtype}")
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(f"{op}: the seed is one int64, got shape {tuple(seed.shape)} of {seed.dtype}")
    check_device(op, x=x, seed=seed)
