"""int8 x int8 -> int32, and on the way out the scales, the correction for zero points, the bias and the output's dtype.

    c[m, n] = (sum_k a[m, k] * b[k, n] - az[m] * sum_k b[k, n]) * as[m] * bs[n] + bias[n]

The sum is an exact int32, so K is at most `int32_terms`. The products with the scales are made in fp32 in this order,
and the result is rounded to its dtype before the bias is added, as in the CPU kernels, so that the bits agree.

wgmma supports int8 operands with the contracted axis last only, so a row-major `a` and a column-major `b` are fast.
Other operands are copied to that order if the product is large enough to pay for the copy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch_config import LaunchConfig, launch
from .launch import check_device, check_matrix, check_shape, row_step, tile_of


@triton.jit
def _transpose(x_ptr, y_ptr, M, N, stride_xm, stride_xn, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    x = tl.load(x_ptr + rows[:, None] * stride_xm + columns[None, :] * stride_xn, mask=mask)
    tl.store(y_ptr + columns[None, :] * M + rows[:, None], x, mask=mask)


def transposed_copy(x: Tensor) -> Tensor:
    """(M, N) of a dtype of one byte, any strides -> (N, M) contiguous; torch's own copy moves single bytes."""
    m, n = x.shape
    y = x.new_empty(n, m)
    if x.numel():
        _transpose[(triton.cdiv(m, 128), triton.cdiv(n, 128))](x, y, m, n, *x.stride(), 128, num_warps=8)
    return y


COPY_ROWS = 256
"""From this many rows (of `a`) and columns (of `b`) on, an operand in another order is copied first."""

CANDIDATES = [
    *(
        LaunchConfig(16, n, k, num_stages=stages)
        for n, k, stages in ((32, 256, 5), (32, 512, 3), (64, 256, 4), (16, 512, 4))
    ),
    *(LaunchConfig(m, n, 128, num_stages=stages) for m, n, stages in ((32, 64, 6), (64, 64, 6), (64, 128, 5))),
    *(
        LaunchConfig(m, n, k, group_m=group, num_warps=warps, num_stages=stages, tma=tma)
        for m, n, k, group, warps, stages in (
            (128, 128, 128, 8, 4, 4), (128, 128, 128, 8, 8, 4), (128, 256, 128, 8, 8, 3), (128, 256, 128, 8, 8, 4),
            (128, 256, 128, 16, 8, 4), (256, 128, 128, 8, 8, 3), (256, 128, 128, 8, 8, 4), (128, 256, 64, 8, 8, 5),
        )
        for tma in (False, True)
    ),
]  # fmt: skip
"""What `autotune` tries."""


@triton.jit
def _finish(
    acc, c_ptr, row_scale_ptr, column_scale_ptr, row_zero_ptr, column_sum_ptr, bias_ptr, rows, columns, M, N,
    stride_cm, stride_cn, stride_rs, stride_cs, stride_rz,
    SCALED: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    in_rows, in_columns = rows < M, columns < N
    if ZEROS:
        zero = tl.load(row_zero_ptr + rows * stride_rz, mask=in_rows, other=0).to(tl.int32)
        sums = tl.load(column_sum_ptr + columns, mask=in_columns, other=0)
        acc -= zero[:, None] * sums[None, :]
    y = acc
    if SCALED:
        column_scale = tl.load(column_scale_ptr + columns * stride_cs, mask=in_columns, other=0.0).to(tl.float32)
        row_scale = tl.load(row_scale_ptr + rows * stride_rs, mask=in_rows, other=0.0).to(tl.float32)
        # Scales near the largest number, as in `without_large`.
        large = column_scale > 1.2089258196146292e24
        column_scale *= tl.where(large, 3.552713678800501e-15, 1.0)
        y = acc.to(tl.float32) * column_scale[None, :] * row_scale[:, None]
        y *= tl.where(large, 281474976710656.0, 1.0)[None, :]
    y = y.to(c_ptr.dtype.element_ty)
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=in_columns, other=0.0)
        y = (y.to(tl.float32) + bias[None, :].to(tl.float32)).to(c_ptr.dtype.element_ty)
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + columns[None, :].to(tl.int64) * stride_cn
    tl.store(c_ptrs, y, mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def _int8_scaled_mm(
    a_ptr, b_ptr, c_ptr, row_scale_ptr, column_scale_ptr, row_zero_ptr, column_sum_ptr, bias_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, stride_rs, stride_cs, stride_rz,
    SCALED: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # Rows beyond the last are read as others, and not stored: no mask in the loop.
    a_rows = (rows % M).to(tl.int64)
    b_columns = (columns % N).to(tl.int64)
    a_ptrs = a_ptr + a_rows[:, None] * stride_am + inner[None, :] * stride_ak
    b_ptrs = b_ptr + b_columns[None, :] * stride_bn + inner[:, None] * stride_bk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0)
            b = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    _finish(
        acc, c_ptr, row_scale_ptr, column_scale_ptr, row_zero_ptr, column_sum_ptr, bias_ptr, rows, columns, M, N,
        stride_cm, stride_cn, stride_rs, stride_cs, stride_rz, SCALED, ZEROS, BIAS,
    )  # fmt: skip


@triton.jit
def _int8_scaled_mm_tma(
    a_desc, b_desc, c_ptr, row_scale_ptr, column_scale_ptr, row_zero_ptr, column_sum_ptr, bias_ptr, M, N, K,
    stride_cm, stride_cn, stride_rs, stride_cs, stride_rz,
    SCALED: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # The same with tiles that the copy engine fetches: (M, K) of a, (N, K) of b, zero beyond their edges.
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for k in range(0, K, BLOCK_K):
        a = a_desc.load([tile_m * BLOCK_M, k])
        b = b_desc.load([tile_n * BLOCK_N, k])
        acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    _finish(
        acc, c_ptr, row_scale_ptr, column_scale_ptr, row_zero_ptr, column_sum_ptr, bias_ptr, rows, columns, M, N,
        stride_cm, stride_cn, stride_rs, stride_cs, stride_rz, SCALED, ZEROS, BIAS,
    )  # fmt: skip


def int8_scaled_mm(
    a: Tensor, b: Tensor, row_scale: Tensor | None, column_scale: Tensor | None, dtype: torch.dtype,
    bias: Tensor | None = None, row_zero: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The equation at the top of the file.

    Args:
        a: (M, K) int8.  b: (K, N) int8. Any strides.
        row_scale: (M, 1), or (1, 1) for one scale; None, with `column_scale` None, for the int32 sums themselves.
        column_scale: (1, N) or (1, 1).
        dtype: of the result: fp32, fp16 or bf16; int32 without scales.
        bias: (N,) floating point, or None.
        row_zero: zero point of a, like `row_scale`, any integer dtype; or None.
    """
    op = "int8_scaled_mm"
    check_matrix(op, "a", a, (torch.int8,))
    check_matrix(op, "b", b, (torch.int8,))
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k:
        raise ValueError(f"{op} takes (M, K) and (K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    scaled = row_scale is not None
    if scaled != (column_scale is not None) or scaled == (dtype == torch.int32):
        raise ValueError(f"{op}: needs both scales and a floating-point dtype, or neither and int32, got {dtype}")
    check_shape(op, "row_scale", row_scale, (m, 1), (1, 1))
    check_shape(op, "column_scale", column_scale, (1, n), (1, 1))
    check_shape(op, "row_zero", row_zero, (m, 1), (1, 1))
    check_shape(op, "bias", bias, (n,))
    check_device(op, a=a, b=b, row_scale=row_scale, column_scale=column_scale, row_zero=row_zero, bias=bias)
    c = a.new_empty(m, n, dtype=dtype)
    if not c.numel():
        return c
    column_sum = None if row_zero is None else b.sum(0, dtype=torch.int32)
    if k and m >= COPY_ROWS and n >= COPY_ROWS:
        a = a if a.stride(1) == 1 else transposed_copy(a.t())
        b = b if b.stride(0) == 1 else transposed_copy(b).t()
    # For a missing argument any pointer will do, because it is not read.
    extra = [c if t is None else t for t in (row_scale, column_scale, row_zero, column_sum, bias)]
    rows, columns, zeros = extra[:3]
    steps = (*c.stride(), row_step(rows), row_step(columns.t()), row_step(zeros))
    flags = {"SCALED": scaled, "ZEROS": row_zero is not None, "BIAS": bias is not None}
    tma = _has_descriptor(a, b)

    def run(config: LaunchConfig) -> None:
        grid = (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n),)
        blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
        options = {**flags, **blocks, "GROUP_M": config.group_m, **config.options, "enable_fp_fusion": False}
        if config.tma and tma:
            a_tiles = TensorDescriptor.from_tensor(a, [config.block_m, config.block_k])
            b_tiles = TensorDescriptor.from_tensor(b.t(), [config.block_n, config.block_k])
            _int8_scaled_mm_tma[grid](a_tiles, b_tiles, c, *extra, m, n, k, *steps, **options)
        else:
            even = k % config.block_k == 0
            _int8_scaled_mm[grid](a, b, c, *extra, m, n, k, *a.stride(), *b.stride(), *steps, EVEN_K=even, **options)

    launch(op, "int8", (m, n, k), run, CANDIDATES, a.device)
    return c


def _has_descriptor(a: Tensor, b: Tensor) -> bool:
    """Whether Hopper's copy engine can fetch tiles: the contracted axis last, all else at multiples of 16 bytes."""
    if a.device.type == "cuda" and torch.cuda.get_device_capability(a.device) < (9, 0):
        return False
    last = a.stride(1) == 1 and b.stride(0) == 1
    return last and all(size % 16 == 0 for size in (a.stride(0), b.stride(1), a.data_ptr(), b.data_ptr()))
