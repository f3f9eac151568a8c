"""Quantization of columns to int8 or float8: one scale a column, the codes written transposed.

    scale[k] = max(max_m |x[m, k]| / L, tiny),    q[k, m] = round(x[m, k] * (1 / scale[k]))

This is what the gradient of a weight wants: it contracts over rows, and an int8 product on Hopper wants its operands
with the contracted axis last. Two launches, so that a tall matrix fills the GPU: maxima of chunks of rows, then codes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...custom_ops import note
from .quantize import LARGEST, TINY, check_input, codes_of, magnitude_bits, scale_of

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
    """One scale a column; `quantize_rowwise` of the transpose, to the bit.

    Args:
        x, dtype, seed: see `quantize_rowwise`.

    Returns:
        codes (K, M), scale (K, 1) fp32.

    Raises:
        ValueError: another dtype or shape.
    """
    check_input("quantize_columnwise", x, dtype, seed)
    m, k = x.shape
    q, scale = x.new_empty(k, m, dtype=dtype), x.new_full((k, 1), TINY, dtype=torch.float32)
    note("triton.quantize_columnwise")
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
