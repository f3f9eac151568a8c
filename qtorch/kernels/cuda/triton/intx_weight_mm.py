"""Weight-only product: a floating-point activation and codes of 1 to 8 bits, 1 to 7 of them packed.

    y[m, n] = sum_k x[m, k] * w[n, k] + bias[n]

    w[n, k] = (q - z) * s             with z and s of the group of k,    z = 0 without zero points        (ZERO 1)
    w[n, k] = (q - middle) * s + z    with z added to scaled codes, FLOAT; in the OFFSET domain, middle = 0    (2)
    w[n, k] = q * s - z * s           with z a code that is a real number, FRACTIONAL                          (3)
    w[n, k] = table[q] * s            with the numbers that codes stand for: tables, small floats             (-1)

Three variants, chosen by M in the launch configuration:

"rows"  few rows of x. Tensor cores multiply 8 or 16 of them at once, at the cost of one. The contracted axis is divided
        among the warps of a program, which add up their sums at the end: enough programs for a GPU, one launch.
"mm"    tensor cores, tiles of more rows. The contracted axis may be split among programs; the parts are added in order
        by a second launch, so that results do not depend on timing.
"dense" many rows: the weight is dequantized, then cuBLAS multiplies.

The weight is the left operand, y' = w x', so that codes go from registers into the products. The scales of a step are
fetched during the step before. Sums are in fp32. Where a tile of at most 64 rows lies in one group, and zero points are
integers, its product is scaled instead of its codes, which are then exact.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_config import LaunchConfig, launch
from .launch import (
    FLOATS,
    SMALLEST_TILE,
    WeightArguments,
    check_device,
    check_matrix,
    check_shape,
    power_of_two_in,
    without_terms,
)  # fmt: skip
from .unpack import dequantize, unpack_floats, unpack_tile

CANDIDATES = [
    *(
        LaunchConfig(m, n, k, num_warps=warps, num_stages=stages, path="rows")
        for m in (8, 16)
        for n, k, warps in ((16, 64, 8), (16, 128, 4), (32, 64, 4), (32, 64, 8), (32, 128, 4), (64, 64, 4))
        for stages in (2, 3, 4)
    ),
    LaunchConfig(32, 32, 64, path="rows"),
    *(
        LaunchConfig(m, n, k, split_k=split, num_warps=warps, num_stages=stages, path="mm")
        for m, n, k, split, warps, stages in (
            (16, 64, 64, 4, 4, 4), (16, 64, 128, 8, 4, 4), (16, 128, 128, 4, 4, 4), (32, 64, 64, 4, 4, 4),
            (32, 128, 64, 2, 4, 4), (64, 64, 64, 1, 4, 4), (64, 64, 64, 2, 4, 4), (64, 64, 64, 4, 4, 4),
            (64, 128, 64, 2, 4, 4), (128, 64, 64, 1, 4, 4), (128, 64, 64, 2, 4, 4), (128, 128, 64, 1, 4, 3),
            (128, 128, 64, 2, 4, 3), (128, 128, 64, 1, 8, 3), (256, 64, 64, 1, 8, 3), (256, 64, 64, 2, 8, 3),
            (256, 128, 64, 1, 8, 3),
        )
    ),
    LaunchConfig(path="dense"),
]  # fmt: skip
"""What `autotune` tries."""


@triton.jit
def _of_segments(rows, k, K, G, stride, GROUP: tl.constexpr, SEGMENTS: tl.constexpr):
    """Scales or zero points of the columns k of all segments."""
    values = ()
    for s in tl.static_range(SEGMENTS):
        values += (tl.load(rows + tl.minimum(k + s * G, K - 1) // GROUP * stride),)  # type: ignore[assignment]
    return values


@triton.jit
def weight_products(
    acc, x_ptrs, rows_in, q_ptrs, scale_rows, zero_rows, table_ptr, inner, start, part_number, K, G,
    stride_xk, stride_sg, stride_zg,
    GROUP: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr,
    ONE_GROUP: tl.constexpr, EVEN: tl.constexpr, SCALE_PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr, PACK: tl.constexpr, STEP: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """`acc` plus a tile of y', in fp32, of part number `part_number` of SPLIT_K of the contracted axis, STEP columns of
    a segment at a time. The pointers are those of the rows of a tile: `x_ptrs` (columns, rows) and `q_ptrs` (rows,
    columns) at the first columns, `scale_rows` and `zero_rows` (rows) at the first group, `table_ptr` at code 0;
    `inner` (columns) counts the columns of a step, `start` (1) is the first; `rows_in` (1, rows) says which rows of x
    there are. All may have a leading axis of tiles that divide the step."""
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    UNITS: tl.constexpr = 1 if BITS == 8 else 4 if BITS >= 4 else 2 if BITS >= 2 else 1
    SEGMENTS: tl.constexpr = 1 if BITS == 8 else 8 // UNITS
    tiles = tl.cdiv(G, STEP)
    part = tl.cdiv(tiles * UNITS, SPLIT_K)
    first = part_number * part
    unit = first // tiles
    g = first % tiles * STEP
    if ONE_GROUP:
        next_scales = _of_segments(scale_rows, unit * SEGMENTS * G + g + start, K, G, stride_sg, GROUP, SEGMENTS)
        if ZERO > 0:
            next_zeros = _of_segments(zero_rows, unit * SEGMENTS * G + g + start, K, G, stride_zg, GROUP, SEGMENTS)
    for _ in range(first, min(first + part, tiles * UNITS)):
        in_segment = g + inner < G
        mask = tl.expand_dims(in_segment, -2)
        at, in_unit = g, unit
        g = tl.where(g + STEP >= G, 0, g + STEP)
        unit += tl.where(g == 0, 1, 0)
        if ONE_GROUP:
            scales = next_scales
            next_scales = _of_segments(scale_rows, unit * SEGMENTS * G + g + start, K, G, stride_sg, GROUP, SEGMENTS)
            if ZERO > 0:
                zeros = next_zeros
                next_zeros = _of_segments(zero_rows, unit * SEGMENTS * G + g + start, K, G, stride_zg, GROUP, SEGMENTS)
        for s in tl.static_range(SEGMENTS):
            k = (in_unit * SEGMENTS + s) * G + at
            x_in = rows_in if EVEN else rows_in & tl.expand_dims(in_segment & (k + inner < K), -1)
            x = tl.load(x_ptrs + k * stride_xk, mask=x_in, other=0.0)
            if ONE_GROUP:
                scale = tl.expand_dims(scales[s], -1).to(tl.float32)
                if ZERO > 0:
                    zero = tl.expand_dims(zeros[s], -1).to(tl.float32)
            else:
                group = tl.expand_dims(tl.minimum(k + inner, K - 1) // GROUP, -2)
                scale = tl.load(tl.expand_dims(scale_rows, -1) + group * stride_sg).to(tl.float32)
                if ZERO > 0:
                    zero = tl.load(tl.expand_dims(zero_rows, -1) + group * stride_zg).to(tl.float32)
            if ZERO == 3:
                zero = -(zero * scale)
            if ZERO == 1:
                code_zero = (zero + OFFSET).to(dtype)
            elif ZERO >= 2:
                code_zero = tl.full([1, 1], OFFSET + MIDDLE, dtype)
            else:
                code_zero = tl.full([1, 1], OFFSET, dtype)
            if ZERO < 0:
                codes = unpack_tile(q_ptrs + at, mask, G, in_unit, s, BITS, not EVEN)
                numbers = table_ptr
                if ZERO == -2:
                    if ONE_GROUP:
                        own_rows = zero_rows + tl.minimum(k + start, K - 1) // GROUP * stride_zg
                        numbers = tl.expand_dims(own_rows, -1)
                    else:
                        numbers = tl.expand_dims(zero_rows, -1) + group * stride_zg
                w = tl.load(numbers + codes.to(tl.int32)).to(dtype)
            else:
                w = unpack_floats(q_ptrs + at, mask, G, in_unit, s, code_zero, ZERO, BITS, not EVEN, ASM, PACK, dtype)
            if SCALE_PRODUCT:
                acc += tl.dot(w, x, input_precision=PRECISION) * scale
            else:
                w = w * scale.to(dtype)
                if ZERO >= 2:
                    w += zero.to(dtype)
                acc = tl.dot(w, x, acc, input_precision=PRECISION)
                if ASM:
                    # A use of the sum makes Triton wait for the product. Else it may be under way at the end of a step,
                    # and the next step overwrites the registers with its operand (triton-lang/triton issue 9433).
                    acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], tl.float32, True, 1)
    return acc


@triton.jit
def store_tile(acc, bias_ptr, y_ptr, m, n, n_in, M, N, BIAS: tl.constexpr):
    """Store a tile of y' (n, m), rounded, with the bias of the rows `n_in` of the weight; nothing beyond (N, M)."""
    y = acc.to(y_ptr.dtype.element_ty)
    if BIAS:
        bias = tl.load(bias_ptr + n_in)[:, None]
        y = (y.to(tl.float32) + bias.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[None, :].to(tl.int64) * N + n[:, None], y, mask=(n[:, None] < N) & (m[None, :] < M))


@triton.jit
def _weight_mm(
    x_ptr, q_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, M, N, K, G,
    stride_xm, stride_xk, stride_qn, stride_sn, stride_sg, stride_zn, stride_zg,
    GROUP: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, ONE_GROUP: tl.constexpr, EVEN: tl.constexpr, SCALE_PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_in = (n % N).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    q_ptrs = q_ptr + n_in[:, None] * stride_qn + inner[None, :]
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * stride_xm + inner[:, None] * stride_xk
    acc = weight_products(
        tl.zeros([BLOCK_N, BLOCK_M], tl.float32), x_ptrs, (m < M)[None, :], q_ptrs, scale_ptr + n_in * stride_sn,
        zero_ptr + n_in * stride_zn, zero_ptr, inner, tl.zeros([1], tl.int32), tl.program_id(2), K, G,
        stride_xk, stride_sg, stride_zg, GROUP, BITS, OFFSET, MIDDLE, ZERO, ONE_GROUP, EVEN, SCALE_PRODUCT, PRECISION,
        ASM, 2, BLOCK_K, SPLIT_K,
    )  # fmt: skip
    part = y_ptr + tl.program_id(2).to(tl.int64) * M * N
    store_tile(acc, bias_ptr, part, m, n, n_in, M, N, BIAS)


@triton.jit
def _sum_parts(part_ptr, y_ptr, bias_ptr, size, N, SPLIT_K: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.load(part_ptr + at, mask=at < size, other=0.0)
    for part in tl.static_range(1, SPLIT_K):
        acc += tl.load(part_ptr + part * tl.cast(size, tl.int64) + at, mask=at < size, other=0.0)
    y = acc.to(y_ptr.dtype.element_ty)
    if BIAS:
        bias = tl.load(bias_ptr + at % N, mask=at < size, other=0.0)
        y = (y.to(tl.float32) + bias.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=at < size)


@triton.jit
def _weight_rows(
    x_ptr, q_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, M, N, K, G,
    stride_xm, stride_xk, stride_qn, stride_sn, stride_sg, stride_zn, stride_zg,
    GROUP: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, ONE_GROUP: tl.constexpr, EVEN: tl.constexpr, SCALE_PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    # Axes (part of a step, row of the weight, column) and (part, column, row of x).
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_in = (n % N).to(tl.int64)
    start = tl.arange(0, PARTS)[:, None] * BLOCK_K
    inner = start + tl.arange(0, BLOCK_K)[None, :]
    acc = weight_products(
        tl.zeros([PARTS, BLOCK_N, BLOCK_M], tl.float32),
        x_ptr + m[None, None, :].to(tl.int64) * stride_xm + inner[:, :, None] * stride_xk, (m < M)[None, None, :],
        q_ptr + n_in[None, :, None] * stride_qn + inner[:, None, :],
        scale_ptr + n_in[None, :] * stride_sn, zero_ptr + n_in[None, :] * stride_zn, zero_ptr, inner, start, 0, K, G,
        stride_xk, stride_sg, stride_zg, GROUP, BITS, OFFSET, MIDDLE, ZERO, ONE_GROUP, EVEN, SCALE_PRODUCT, PRECISION,
        ASM, 4, BLOCK_K * PARTS, 1,
    )  # fmt: skip
    store_tile(tl.sum(acc, 0), bias_ptr, y_ptr, m, n, n_in, M, N, BIAS)


def intx_weight_mm(
    x: Tensor, qdata: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: str, middle: float, domain: str,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `cuda_weight_mm`; any strides. In the domain TABLE, the numbers of all codes (2^bits), or those of each
    group (N or 1, groups, 2^bits), are in place of zero points."""
    op = "intx_weight_mm"
    check_matrix(op, "x", x, FLOATS)
    m, k = x.shape
    weight = WeightArguments(op, k, qdata, scale, zero_point, dtype, middle, domain)
    n = weight.n
    check_shape(op, "bias", bias, (n,))
    check_device(op, x=x, qdata=qdata, scale=scale, zero_point=zero_point, bias=bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    y = x.new_empty(m, n)
    if not y.numel() or not k:
        return without_terms(y, bias)

    def run(config: LaunchConfig) -> None:
        if config.path == "rows":
            _launch_rows(x, weight, bias, y, config)
        elif config.path == "dense":
            torch.mm(x, dequantize(weight, x.dtype).t(), out=y)
            if bias is not None:
                y.add_(bias)
        else:
            _launch_mm(x, weight, bias, y, config)

    rows = min(max(m, 9), 256)
    near = (c for c in CANDIDATES if c.path == "dense" or rows <= 4 * c.block_m < 8 * rows)
    launch(op, weight.key, (m, n, k), run, near, x.device)
    return y


def _launch_rows(x: Tensor, weight: WeightArguments, bias: Tensor | None, y: Tensor, config: LaunchConfig) -> None:
    (m, n), block_m, parts = y.shape, max(8, config.block_m), config.num_warps
    # As long tiles as divide a segment with the parts.
    block_k = min(config.block_k, max(SMALLEST_TILE, power_of_two_in(weight.segment) // parts))
    constants: Any = weight.constants(x, block_m, block_k)
    constants["EVEN"] = weight.whole_segments and weight.segment % (constants["BLOCK_K"] * parts) == 0
    _weight_rows[(triton.cdiv(n, config.block_n), triton.cdiv(m, block_m))](
        x, *weight.pointers, y if bias is None else bias, y, m, n, *weight.sizes, *x.stride(), *weight.steps,
        **constants, BIAS=bias is not None, BLOCK_N=config.block_n, PARTS=parts, **config.options,
        enable_fp_fusion=True,
    )  # fmt: skip


def _launch_mm(x: Tensor, weight: WeightArguments, bias: Tensor | None, y: Tensor, config: LaunchConfig) -> None:
    m, n = y.shape
    block_m = max(16, config.block_m)
    parts = y if config.split_k == 1 else y.new_empty(config.split_k, m, n, dtype=torch.float32)
    _weight_mm[(triton.cdiv(n, config.block_n), triton.cdiv(m, block_m), config.split_k)](
        x, *weight.pointers, y if bias is None else bias, parts, m, n, *weight.sizes, *x.stride(), *weight.steps,
        **weight.constants(x, block_m, config.block_k), BIAS=bias is not None and config.split_k == 1,
        BLOCK_N=config.block_n, SPLIT_K=config.split_k, **config.options, enable_fp_fusion=True,
    )  # fmt: skip
    if config.split_k > 1:
        _sum_parts[(triton.cdiv(m * n, 1024),)](
            parts, y, y if bias is None else bias, m * n, n, config.split_k, bias is not None, 1024, num_warps=4
        )
