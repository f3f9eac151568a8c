"""Quantization of rows to int8 with a zero point, in one pass over the input.

    scale[m] = max((high - low) / 255, tiny),      low = min(min_k x[m, k], 0), high = max(max_k x[m, k], 0)
    zero[m]  = -128 - round(low / scale),          q[m, k] = clamp(round(x[m, k] * (1 / scale)) + zero, -128, 127)

To the bit what the primitives give for an asymmetric mapping onto int8; NaN is the scale of a row that holds a NaN or
an infinity.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...custom_ops import note
from .arguments import FLOATS, check_device, check_matrix, next_power_of_two
from .quantize import TINY, WHOLE_ROW, magnitude_bits

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
    """Codes, scales and zero points by the equations at the top of the file.

    Args:
        x: (M, K) fp32, fp16 or bf16, any strides, K at most 16384.

    Returns:
        codes (M, K) int8, scale (M, 1) fp32, zero point (M, 1) int8.

    Raises:
        ValueError: another dtype or shape.
    """
    op = "quantize_rowwise_asymmetric"
    check_matrix(op, "x", x, FLOATS)
    check_device(op, x=x)
    m, k = x.shape
    if k > WHOLE_ROW:
        raise ValueError(f"{op} takes rows of at most {WHOLE_ROW} elements, got shape {(m, k)}")
    q, scale = x.new_empty(m, k, dtype=torch.int8), x.new_full((m, 1), TINY, dtype=torch.float32)
    zero = x.new_full((m, 1), -128, dtype=torch.int8)
    note(f"triton.{op}")
    if x.numel():
        block = next_power_of_two(k)
        rows = max(1, 1024 // block)
        _quantize_rows_asymmetric[(triton.cdiv(m, rows),)](
            x, q, scale, zero, m, k, *x.stride(), TINY, LARGEST_SCALE, rows, block,
            num_warps=max(1, min(16, rows * block // 512)), enable_fp_fusion=False,
        )  # fmt: skip
    return q, scale, zero
