"""Weight-only product: a floating-point activation and integer codes of 1 to 8 bits, 1 to 7 of them packed.

    y[m, n] = sum_k x[m, k] * w[n, k] + bias[n]

    w[n, k] = (q - z) * s             with z and s of the group of k,    z = 0 without zero points        (ZERO 1)
    w[n, k] = (q - middle) * s + z    with z added to scaled codes, FLOAT; in the OFFSET domain, middle = 0    (2)
    w[n, k] = q * s - z * s           with z a code that is a real number, FRACTIONAL                          (3)

Three variants, chosen by M in the launch configuration:

"mv"    one row of x: each program multiplies a few rows of the weight, without tensor cores.
"mm"    tensor cores. The weight is the left operand, y' = w x', so that codes go from registers into the products and a
        tile of 16 rows of x wastes nothing. The contracted axis may be split; the parts are added in order by a second
        launch, so that results do not depend on timing.
"dense" many rows: the weight is dequantized, then cuBLAS multiplies.

Sums are in fp32. Where a tile lies in one group, its product is scaled instead of its codes, which are then exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_config import LaunchConfig, launch
from .launch import FLOATS, WeightArguments, check_device, check_matrix, check_shape, power_of_two_in, without_terms
from .unpack import dequantize, unpack_floats

CANDIDATES = [
    *(
        LaunchConfig(1, n, k, num_warps=warps, path="mv")
        for n, k, warps in ((2, 512, 2), (4, 512, 4), (8, 512, 4), (8, 256, 4), (1, 2048, 4), (4, 1024, 4))
    ),
    *(
        LaunchConfig(16, n, k, split_k=split, num_stages=stages, path="mm")
        for n, k in ((64, 64), (64, 128), (128, 64), (128, 128))
        for split in (1, 2, 4, 8)
        for stages in (3, 5)
    ),
    *(
        LaunchConfig(m, n, 64, split_k=split, num_warps=warps, num_stages=stages, path="mm")
        for m, n, split, warps, stages in (
            (32, 64, 4, 4, 4),
            (32, 128, 4, 4, 4),
            (64, 64, 2, 4, 4),
            (64, 128, 1, 4, 4),
            (64, 128, 2, 4, 4),
            (128, 128, 1, 4, 3),
            (128, 128, 1, 8, 3),
            (256, 128, 1, 8, 3),
        )
    ),
    LaunchConfig(path="dense"),
]
"""What `autotune` tries."""

RUN = 16
"""Codes that a thread of "mv" multiplies before it scales."""


@triton.jit
def weight_products(
    x_ptrs, q_ptrs, scale_rows, zero_rows, inner, part_number, K, G, stride_xk, stride_sg, stride_zg,
    GROUP: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr,
    ONE_GROUP: tl.constexpr, EVEN: tl.constexpr, SCALE_PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """A tile of y', in fp32, of part number `part_number` of SPLIT_K of the contracted axis. The pointers are those of
    the rows of a tile: `x_ptrs` (BLOCK_K, BLOCK_M) and `q_ptrs` (BLOCK_N, BLOCK_K) at the first column, `scale_rows`
    and `zero_rows` (BLOCK_N) at the first group; `inner` is 0 to BLOCK_K."""
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    UNITS: tl.constexpr = 1 if BITS == 8 else 4 if BITS >= 4 else 2 if BITS >= 2 else 1
    SEGMENTS: tl.constexpr = 1 if BITS == 8 else 8 // UNITS
    tiles = tl.cdiv(G, BLOCK_K)
    part = tl.cdiv(tiles * UNITS, SPLIT_K)
    first = part_number * part
    unit = first // tiles
    g = first % tiles * BLOCK_K
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for _ in range(first, min(first + part, tiles * UNITS)):
        in_segment = g + inner < G
        for s in tl.static_range(SEGMENTS):
            k = (unit * SEGMENTS + s) * G + g
            if EVEN:
                x = tl.load(x_ptrs + k * stride_xk)
            else:
                x = tl.load(x_ptrs + k * stride_xk, mask=(in_segment & (k + inner < K))[:, None], other=0.0)
            if ONE_GROUP:
                group = min(k, K - 1) // GROUP
                scale = tl.load(scale_rows + group * stride_sg)[:, None]
                if ZERO:
                    zero = tl.load(zero_rows + group * stride_zg)[:, None]
            else:
                group = tl.minimum(k + inner, K - 1) // GROUP
                scale = tl.load(scale_rows[:, None] + group[None, :] * stride_sg)
                if ZERO:
                    zero = tl.load(zero_rows[:, None] + group[None, :] * stride_zg)
            if ZERO == 3:
                zero = -(zero.to(tl.float32) * scale.to(tl.float32))
            if ZERO == 1:
                code_zero = (zero.to(tl.float32) + OFFSET).to(dtype)
            elif ZERO >= 2:
                code_zero = tl.full([1, 1], OFFSET + MIDDLE, dtype)
            else:
                code_zero = tl.full([1, 1], OFFSET, dtype)
            w = unpack_floats(q_ptrs + g, in_segment[None, :], G, unit, s, code_zero, ZERO, BITS, not EVEN, ASM, dtype)
            if SCALE_PRODUCT:
                acc += tl.dot(w, x, input_precision=PRECISION) * scale.to(tl.float32)
                if ZERO >= 2:
                    acc += zero.to(tl.float32) * tl.sum(x.to(tl.float32), 0)[None, :]
            else:
                if ZERO >= 2:
                    w = (w.to(tl.float32) * scale.to(tl.float32) + zero.to(tl.float32)).to(dtype)
                else:
                    w = w * scale.to(dtype)
                acc = tl.dot(w, x, acc, input_precision=PRECISION)
        g += BLOCK_K
        unit += tl.where(g >= G, 1, 0)
        g = tl.where(g >= G, 0, g)
    return acc


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
    # Rows beyond the last are read as others, and not stored.
    n_in = (n % N).to(tl.int64)
    m_in = (m % M).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    q_ptrs = q_ptr + n_in[:, None] * stride_qn + inner[None, :]
    x_ptrs = x_ptr + m_in[None, :] * stride_xm + inner[:, None] * stride_xk
    acc = weight_products(
        x_ptrs, q_ptrs, scale_ptr + n_in * stride_sn, zero_ptr + n_in * stride_zn, inner, tl.program_id(2), K, G,
        stride_xk, stride_sg, stride_zg, GROUP, BITS, OFFSET, MIDDLE, ZERO, ONE_GROUP, EVEN, SCALE_PRODUCT, PRECISION,
        ASM, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K,
    )  # fmt: skip
    y = acc.to(y_ptr.dtype.element_ty)
    if BIAS:
        bias = tl.load(bias_ptr + n_in)[:, None]
        y = (y.to(tl.float32) + bias.to(tl.float32)).to(y_ptr.dtype.element_ty)
    rows = tl.program_id(2).to(tl.int64) * M + m
    tl.store(y_ptr + rows[None, :] * N + n[:, None], y, mask=(n[:, None] < N) & (m[None, :] < M))


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
def _weight_mv(
    x_ptr, q_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, N, K, G,
    stride_xk, stride_qn, stride_sn, stride_sg, stride_zn, stride_zg,
    GROUP: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, ONE_GROUP: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    RUN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Axes (row of the weight, run, code of the run). The codes of a run are multiplied and added up by one thread.
    UNITS: tl.constexpr = 1 if BITS == 8 else 4 if BITS >= 4 else 2 if BITS >= 2 else 1
    SEGMENTS: tl.constexpr = 1 if BITS == 8 else 8 // UNITS
    # In bf16 and fp16 the difference of a code and its zero point is exact, and cheaper to make.
    exact: tl.constexpr = x_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None, None]
    n_in = (n % N).to(tl.int64)
    runs = tl.arange(0, BLOCK_K // RUN)[None, :, None] * RUN
    inner = runs + tl.arange(0, RUN)[None, None, :]
    q_ptrs = q_ptr + n_in * stride_qn + inner
    x_ptrs = x_ptr + inner * stride_xk + tl.zeros([BLOCK_N, 1, 1], tl.int32)
    acc = tl.zeros([BLOCK_N, BLOCK_K // RUN], tl.float32)
    for g in range(0, G, BLOCK_K):
        in_segment = g + inner < G
        # The units of a tile are unrolled, so that their loads are all in flight.
        for unit in tl.static_range(UNITS):
            for s in tl.static_range(SEGMENTS):
                k = (unit * SEGMENTS + s) * G + g
                if EVEN:
                    x = tl.load(x_ptrs + k * stride_xk).to(tl.float32)
                else:
                    x = tl.load(x_ptrs + k * stride_xk, mask=in_segment & (k + inner < K), other=0.0).to(tl.float32)
                # One group a run, or one a code.
                group = tl.minimum(k + (runs if ONE_GROUP else inner), K - 1) // GROUP
                scale = tl.load(scale_ptr + n_in * stride_sn + group * stride_sg).to(tl.float32)
                if ZERO:
                    zero = tl.load(zero_ptr + n_in * stride_zn + group * stride_zg).to(tl.float32)
                if ZERO == 3:
                    zero = -(zero * scale)
                if ZERO == 1:
                    code_zero = (zero + OFFSET).to(exact)
                elif ZERO >= 2:
                    code_zero = tl.full([1, 1, 1], OFFSET + MIDDLE, exact)
                else:
                    code_zero = tl.full([1, 1, 1], OFFSET, exact)
                w = unpack_floats(q_ptrs + g, in_segment, G, unit, s, code_zero, ZERO, BITS, not EVEN, ASM, exact)
                product = w.to(tl.float32) * x
                if ONE_GROUP:
                    acc += tl.sum(product, 2) * scale.reshape(BLOCK_N, BLOCK_K // RUN)
                    if ZERO >= 2:
                        acc += tl.sum(x, 2) * zero.reshape(BLOCK_N, BLOCK_K // RUN)
                else:
                    acc += tl.sum(product * scale, 2)
                    if ZERO >= 2:
                        acc += tl.sum(x * zero, 2)
    y = tl.sum(acc, 1).to(y_ptr.dtype.element_ty)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if BIAS:
        y = (y.to(tl.float32) + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + n, y, mask=n < N)


def intx_weight_mm(
    x: Tensor, qdata: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: str, middle: float, domain: str,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `cuda_weight_mm`; any strides."""
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
        if config.path == "mv" and m == 1:
            _launch_mv(x, weight, bias, y, config)
        elif config.path == "dense":
            torch.mm(x, dequantize(weight, x.dtype).t(), out=y)
            if bias is not None:
                y.add_(bias)
        else:
            _launch_mm(x, weight, bias, y, config)

    launch(op, weight.key, (m, n, k), run, [c for c in CANDIDATES if m == 1 or c.path != "mv"], x.device)
    return y


def _launch_mv(x: Tensor, weight: WeightArguments, bias: Tensor | None, y: Tensor, config: LaunchConfig) -> None:
    # A tile may hold several groups, as long as runs of RUN codes do not.
    block_k = min(config.block_k, max(power_of_two_in(weight.segment), 64))
    one_group = weight.groups == 1 or (weight.group % RUN == 0 and weight.segment % RUN == 0)
    even = weight.segment % block_k == 0 and weight.whole_segments
    _weight_mv[(triton.cdiv(weight.n, config.block_n),)](
        x, *weight.pointers, y if bias is None else bias, y, weight.n, *weight.sizes, x.stride(1), *weight.steps,
        **weight.numerics, BIAS=bias is not None, ONE_GROUP=one_group, EVEN=even, ASM=x.device.type == "cuda", RUN=RUN,
        BLOCK_N=config.block_n, BLOCK_K=block_k, num_warps=config.num_warps, enable_fp_fusion=True,
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
