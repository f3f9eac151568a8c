"""The floating-point weight of integer codes: w[n, k] = (q - z) * s, or (q - middle) * s + z; see `intx_weight_mm`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import to_float, unpack_tile
from .weight import WeightArguments


@triton.jit
def _dequantize(
    q_ptr, scale_ptr, zero_ptr, w_ptr, N, K, G, stride_qn, stride_sn, stride_sg, stride_zn, stride_zg,
    GROUP: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    UNITS: tl.constexpr = 1 if BITS == 8 else 4 if BITS >= 4 else 2 if BITS >= 2 else 1
    SEGMENTS: tl.constexpr = 1 if BITS == 8 else 8 // UNITS
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n % N
    inner = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    q_ptrs = q_ptr + n_in[:, None] * stride_qn + inner[None, :]
    in_segment = inner < G
    for unit in tl.static_range(UNITS):
        for s in tl.static_range(SEGMENTS):
            codes = unpack_tile(q_ptrs, in_segment[None, :], G, unit, s, BITS, True)
            k = (unit * SEGMENTS + s) * G + inner
            group = (tl.minimum(k, K - 1) // GROUP)[None, :]
            scale = tl.load(scale_ptr + n_in[:, None] * stride_sn + group * stride_sg).to(tl.float32)
            if ZERO:
                zero = tl.load(zero_ptr + n_in[:, None] * stride_zn + group * stride_zg).to(tl.float32)
            if ZERO == 1:
                w = to_float(codes, zero + OFFSET, BITS, tl.float32) * scale
            elif ZERO == 3:
                w = (to_float(codes, OFFSET, BITS, tl.float32) - zero) * scale
            elif ZERO == 2:
                w = to_float(codes, OFFSET + MIDDLE, BITS, tl.float32) * scale + zero
            else:
                w = to_float(codes, OFFSET, BITS, tl.float32) * scale
            mask = (n[:, None] < N) & (in_segment & (k < K))[None, :]
            tl.store(w_ptr + n[:, None] * K + k[None, :], w.to(w_ptr.dtype.element_ty), mask=mask)


def dequantize(weight: WeightArguments, dtype: torch.dtype) -> Tensor:
    """The weight (N, K) in floating point."""
    w = weight.qdata.new_empty(weight.n, weight.k, dtype=dtype)
    _dequantize[(triton.cdiv(weight.n, 8), triton.cdiv(weight.segment, 256))](
        *weight.pointers,
        w,
        weight.n,
        *weight.sizes,
        *weight.steps,
        **weight.numerics,
        BLOCK_N=8,
        BLOCK_K=256,
        num_warps=4,
    )
    return w
