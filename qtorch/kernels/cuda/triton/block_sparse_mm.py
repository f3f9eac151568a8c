"""Integer weights in blocks most of which are dropped, times int8 or floating-point activations.

    y[m, n] = (sum_g (sum_{k in g} (x[m, c(k)] - xz[m]) w[n, k]) * ws[n, g]) * xs[m] + bias[n]

k runs over what is stored of row n, and c(k) is the column of x that it belongs to; without xs, x is not quantized.
With int8 the inner sum is an exact int32; the outer one is in fp32, in order, without fused multiply-add. The weight is
the left operand, as in int8_grouped_mm.py. A program has the rows of one row of blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_config import LaunchConfig, launch
from .intx_weight_mm import store_tile
from .launch import FLOATS, GroupedCodes, check_device, check_matrix, check_shape, row_step
from .unpack import unpack_int8

CANDIDATES = [
    LaunchConfig(m, 64, 64, num_warps=warps, num_stages=stages)
    for m, warps in ((16, 4), (32, 4), (64, 4), (128, 4), (128, 8))
    for stages in (3, 4, 5)
]
"""What `autotune` tries; rows and columns of a step are those of a block."""


@triton.jit
def _block_sparse_mm(
    x_ptr, q_ptr, y_ptr, columns_ptr, scale_ptr, x_scale_ptr, x_zero_ptr, bias_ptr, M, N, KEPT, G,
    stride_xm, stride_xk, stride_qn, stride_sn, stride_sg, stride_xs, stride_xz,
    SIZE: tl.constexpr, GROUP: tl.constexpr, GROUPED: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    INTEGERS: tl.constexpr, INPUT_ZERO: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    sums: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    row = tl.program_id(0)
    n = (row * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows beyond the last are read as others, and not stored.
    m_in = (m % M).to(tl.int64)
    inner = tl.arange(0, GROUP)
    q_ptrs = q_ptr + n[:, None] * stride_qn
    x_ptrs = x_ptr + m_in[None, :] * stride_xm + inner[:, None] * stride_xk
    total = tl.zeros([SIZE, BLOCK_M], tl.float32)
    part = tl.zeros([SIZE, BLOCK_M], sums)
    sum_w = tl.zeros([SIZE], tl.int32)
    x_zero = tl.load(x_zero_ptr + m_in * stride_xz).to(tl.int32) if INPUT_ZERO else tl.zeros([BLOCK_M], tl.int32)
    for block in range(KEPT):
        column = tl.load(columns_ptr + row * KEPT + block) * SIZE
        for group in tl.static_range(SIZE // GROUP):
            k = block * SIZE + group * GROUP + inner
            segment = k // G
            pointers = q_ptrs + (k - segment * G)[None, :]
            w = unpack_int8(pointers, None, G, segment[None, :], BITS, OFFSET, False, ASM)
            x = tl.load(x_ptrs + (column + group * GROUP) * stride_xk)
            if INTEGERS:
                part = tl.dot(w, x, part, out_dtype=tl.int32)
            else:
                part = tl.dot(w.to(x.dtype), x, part, input_precision="ieee")
            if INPUT_ZERO:
                sum_w += tl.sum(w.to(tl.int32), 1)
            if GROUPED:
                if INPUT_ZERO:
                    part -= sum_w[:, None] * x_zero[None, :]
                    sum_w = tl.zeros([SIZE], tl.int32)
                at = scale_ptr + n * stride_sn + (block * (SIZE // GROUP) + group) * stride_sg
                total += part.to(tl.float32) * tl.load(at).to(tl.float32)[:, None]
                part = tl.zeros([SIZE, BLOCK_M], sums)
    if not GROUPED:
        if INPUT_ZERO:
            part -= sum_w[:, None] * x_zero[None, :]
        total += part.to(tl.float32) * tl.load(scale_ptr + n * stride_sn).to(tl.float32)[:, None]
    if INTEGERS:
        total *= tl.load(x_scale_ptr + m_in * stride_xs).to(tl.float32)[None, :]
    store_tile(total, bias_ptr, y_ptr, m, n, n, M, N, BIAS)


def block_sparse_mm(
    x: Tensor, xs: Tensor | None, xz: Tensor | None, qdata: Tensor, columns: Tensor, ws: Tensor, weight_dtype: str,
    dtype: torch.dtype, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `cpu_block_sparse_mm`; any strides of x, blocks of 32, 64 or 128, groups of 32 or more. `bias` is added to
    the rounded result, and the values of `columns` are not checked here."""
    op = "block_sparse_mm"
    check_matrix(op, "x", x, (torch.int8,) if xs is not None else FLOATS)
    check_matrix(op, "columns", columns, (torch.int32,))
    (m, k), n, (rows, kept) = x.shape, qdata.shape[0], columns.shape
    size = n // max(rows, 1)
    if size not in (32, 64, 128) or rows * size != n or k % size:
        raise ValueError(f"{op} takes blocks of 32, 64 or 128, got {rows} rows of blocks for N, K = {(n, k)}")
    weight = GroupedCodes(op, kept * size, qdata, ws, None, weight_dtype)
    if weight.bits == 8:
        check_matrix(op, "qdata", qdata, (torch.int8,))
    group = weight.group if weight.groups > 1 else size
    if group not in (32, 64, 128) or size % group:
        raise ValueError(f"{op}: groups of 32 or more divide a block of {size}, got {group}")
    check_shape(op, "xs", xs, (m, 1), (1, 1))
    check_shape(op, "xz", xz, (m, 1), (1, 1))
    check_shape(op, "bias", bias, (n,))
    check_device(op, x=x, xs=xs, xz=xz, qdata=qdata, columns=columns, ws=ws, bias=bias)
    y = x.new_empty(m, n, dtype=dtype)
    if not y.numel():
        return y
    columns = columns.contiguous()
    x_scale = ws if xs is None else xs
    x_zero = x_scale if xz is None else xz
    steps = (*x.stride(), weight.qdata.stride(0), *ws.stride(), row_step(x_scale), row_step(x_zero))

    def run(config: LaunchConfig) -> None:
        _block_sparse_mm[(rows, triton.cdiv(m, config.block_m))](
            x, weight.qdata, y, columns, ws, x_scale, x_zero, y if bias is None else bias, m, n, kept, weight.segment,
            *steps, SIZE=size, GROUP=group, GROUPED=weight.groups > 1, BITS=weight.bits, OFFSET=weight.offset,
            INTEGERS=xs is not None, INPUT_ZERO=xz is not None, BIAS=bias is not None, ASM=x.device.type == "cuda",
            BLOCK_M=config.block_m, **config.options, enable_fp_fusion=False,
        )  # fmt: skip

    launch(op, f"int{weight.bits}", (m, n, k), run, CANDIDATES, x.device)
    return y
