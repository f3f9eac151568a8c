"""A weight update rounded stochastically, in place: training without a copy of the weight in higher precision.

bf16:   w <- round(w + a u)                 to one of the two neighbours in bf16, unbiased
int8:   w <- quantize(q s + a u)            by rows: s = max(max_k |q s + a u| / 127, tiny), q stochastic

u is the update (M, K) and a a number, -lr. Random bits are Philox's at (seed, k, m), as in `quantize_rowwise`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...custom_ops import note
from .launch import FLOATS, check_device, check_matrix, check_seed, check_shape
from .quantize import TINY, WHOLE_ROW, codes_of, magnitude_bits, scale_of


@triton.jit
def _update_bf16(w_ptr, u_ptr, seed_ptr, alpha, K, stride_wm, stride_wk, stride_um, stride_uk, BLOCK_K: tl.constexpr):
    row = tl.program_id(0)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = k < K
    w_ptrs = w_ptr + row.to(tl.int64) * stride_wm + k * stride_wk
    u = tl.load(u_ptr + row.to(tl.int64) * stride_um + k * stride_uk, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptrs, mask=mask, other=0.0).to(tl.float32) + alpha * u
    noise, _, _, _ = tl.philox(tl.load(seed_ptr), k, row + k * 0, k * 0, k * 0)
    # A random number below one step of bf16, then truncation: up with the probability of the fraction. Infinity and NaN
    # have no fraction to round.
    bits = w.to(tl.int32, bitcast=True)
    rounded = (bits + (noise & 0xFFFF).to(tl.int32)) & -65536
    finite = (bits & 0x7F800000) != 0x7F800000
    w = tl.where(finite, rounded, bits).to(tl.float32, bitcast=True)
    tl.store(w_ptrs, w.to(tl.bfloat16), mask=mask)


@triton.jit
def _update_int8(
    q_ptr, scale_ptr, u_ptr, seed_ptr, alpha, K, stride_qm, stride_um, stride_uk, TINY: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    mask = k < K
    q_ptrs = q_ptr + row.to(tl.int64) * stride_qm + k
    old = tl.load(scale_ptr + row)
    u = tl.load(u_ptr + row.to(tl.int64) * stride_um + k * stride_uk, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(q_ptrs, mask=mask, other=0).to(tl.float32) * old + alpha * u
    scale = scale_of(tl.max(magnitude_bits(w), 0), 127.0, TINY)
    q = codes_of(w, tl.div_rn(1.0, scale), row + k * 0, k, seed_ptr, 127.0, True, tl.int8)
    tl.store(q_ptrs, q, mask=mask)
    tl.store(scale_ptr + row, scale)


def _check(op: str, w: Tensor, u: Tensor, seed: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> None:
    check_matrix(op, "the weight", w, (dtype,))
    check_matrix(op, "the update", u, FLOATS)
    check_shape(op, "the update", u, tuple(w.shape))
    check_shape(op, "scale", scale, (w.shape[0], 1))
    check_seed(op, seed)
    check_device(op, weight=w, update=u, seed=seed, scale=scale)
    note(f"triton.{op}")


def update_bf16(w: Tensor, u: Tensor, alpha: float, seed: Tensor) -> None:
    """See `stochastic_update_bf16_`; `seed` is an int64 (1,) on the device of w."""
    _check("update_bf16", w, u, seed, torch.bfloat16)
    if w.numel():
        block = min(2048, triton.next_power_of_2(w.shape[1]))
        _update_bf16[(w.shape[0], triton.cdiv(w.shape[1], block))](
            w, u, seed, alpha, w.shape[1], *w.stride(), *u.stride(), block, num_warps=max(1, block // 256),
            enable_fp_fusion=False,
        )  # fmt: skip


def update_int8(q: Tensor, scale: Tensor, u: Tensor, alpha: float, seed: Tensor) -> None:
    """See `stochastic_update_int8_`; scales and rows are contiguous, rows of at most 16384 codes."""
    _check("update_int8", q, u, seed, torch.int8, scale)
    if q.stride(1) != 1 or not scale.is_contiguous() or scale.dtype != torch.float32 or q.shape[1] > WHOLE_ROW:
        raise ValueError(
            f"update_int8 takes contiguous rows of at most {WHOLE_ROW} codes and contiguous fp32 scales, got strides "
            f"{q.stride()}, shape {tuple(q.shape)}, scales of {scale.dtype} with strides {scale.stride()}"
        )
    if q.numel():
        block = triton.next_power_of_2(q.shape[1])
        _update_int8[(q.shape[0],)](
            q, scale, u, seed, alpha, q.shape[1], q.stride(0), *u.stride(), TINY, block,
            num_warps=max(1, min(16, block // 512)), enable_fp_fusion=False,
        )  # fmt: skip
