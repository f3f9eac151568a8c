"""int8 activations times integer weights with a scale per group, plain or packed, 1 to 8 bits.

    y[m, n] = (sum_g (sum_{k in g} (x[m, k] - xz[m]) (w[n, k] - wz[n, g])) * ws[n, g]) * xs[m] + bias[n]

The inner sum is an exact int32; the outer one runs in fp32 in the order of the groups, without fused multiply-add, so
that the bits are those of the CPU kernels. The weight is the left operand, y' = w x', so that unpacked codes go from
registers into the products. The bytes of a packed tile are read once for each segment they hold codes of: from memory
the first time, from a cache after.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_config import LaunchConfig, launch
from .intx_weight_mm import store_tile
from .launch import GroupedCodes, check_device, check_matrix, check_shape, power_of_two_in, row_step, without_terms
from .unpack import unpack_int8

CANDIDATES = [
    LaunchConfig(m, n, k, num_warps=warps, num_stages=stages)
    for m, n, warps in ((16, 32, 4), (16, 64, 4), (32, 64, 4), (64, 64, 4), (64, 128, 4), (128, 128, 8), (256, 128, 8))
    for k in (64, 128)
    for stages in (3, 4)
]
"""What `autotune` tries."""

UNROLLED = 4
"""Tiles of a group that are unrolled; more are a loop."""


@triton.jit
def _add_tile(
    part, sum_x, sum_w, x_ptrs, q_ptrs, k, last, inner, G, stride_xk,
    BITS: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr, SUM_X: tl.constexpr, SUM_W: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """One tile of a group, from k on: products into `part`, sums into `sum_x` and `sum_w`. `last` ends the group."""
    valid = k + inner < last
    if EVEN:
        segment = k // G
        w = unpack_int8(q_ptrs + (k - segment * G + inner)[None, :], None, G, segment, BITS, OFFSET, False, ASM)
        x = tl.load(x_ptrs + k * stride_xk)
    else:
        segment = (k + inner) // G
        pointers = q_ptrs + (k + inner - segment * G)[None, :]
        w = unpack_int8(pointers, valid[None, :], G, segment[None, :], BITS, OFFSET, True, ASM)
        w = tl.where(valid[None, :], w, 0).to(tl.int8)
        x = tl.load(x_ptrs + k * stride_xk, mask=valid[:, None], other=0)
    part = tl.dot(w, x, part, out_dtype=tl.int32)
    if SUM_X:
        sum_x += tl.sum(x.to(tl.int32), 0)
    if SUM_W:
        # By the tensor cores, which have little to do where this is needed: each column is the sum.
        sum_w = tl.dot(w, tl.full([x.shape[0], 16], 1, tl.int8), sum_w, out_dtype=tl.int32)
    return part, sum_x, sum_w


@triton.jit
def int8_products(
    x_ptrs, q_ptrs, scale_rows, zero_rows, x_zero_rows, inner, K, G, stride_xk, stride_sg, stride_zg,
    GROUP: tl.constexpr, TILES: tl.constexpr, UNROLL: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    WEIGHT_ZERO: tl.constexpr, INPUT_ZERO: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of y' before the scales of x. The pointers are those of the rows of a tile: `x_ptrs` (BLOCK_K, BLOCK_M)
    and `q_ptrs` (BLOCK_N, 1) at the first column, `scale_rows` and `zero_rows` (BLOCK_N) at the first group,
    `x_zero_rows` (BLOCK_M); `inner` is 0 to BLOCK_K."""
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_zero = tl.load(x_zero_rows).to(tl.int32) if INPUT_ZERO else tl.zeros([BLOCK_M], tl.int32)
    for group in range(0, K // GROUP):
        part = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
        sum_x = tl.zeros([BLOCK_M], tl.int32)
        sum_w = tl.zeros([BLOCK_N, 16], tl.int32)
        first = group * GROUP
        if UNROLL:
            for tile in tl.static_range(TILES):
                part, sum_x, sum_w = _add_tile(
                    part, sum_x, sum_w, x_ptrs, q_ptrs, first + tile * BLOCK_K, first + GROUP, inner, G, stride_xk,
                    BITS, OFFSET, EVEN, WEIGHT_ZERO, INPUT_ZERO, ASM,
                )  # fmt: skip
        else:
            for tile in range(TILES):
                part, sum_x, sum_w = _add_tile(
                    part, sum_x, sum_w, x_ptrs, q_ptrs, first + tile * BLOCK_K, first + GROUP, inner, G, stride_xk,
                    BITS, OFFSET, EVEN, WEIGHT_ZERO, INPUT_ZERO, ASM,
                )  # fmt: skip
        if WEIGHT_ZERO:
            zero = tl.load(zero_rows + group * stride_zg).to(tl.int32)
            if OFFSET == 128:
                zero -= 128
            part -= zero[:, None] * sum_x[None, :]
        if INPUT_ZERO:
            sums = tl.max(sum_w, 1)
            if WEIGHT_ZERO:
                sums -= GROUP * zero
            part -= sums[:, None] * x_zero[None, :]
        scale = tl.load(scale_rows + group * stride_sg).to(tl.float32)
        total += part.to(tl.float32) * scale[:, None]
    return total


@triton.jit
def _int8_grouped_mm(
    x_ptr, q_ptr, y_ptr, scale_ptr, zero_ptr, x_scale_ptr, x_zero_ptr, bias_ptr, M, N, K, G,
    stride_xm, stride_xk, stride_qn, stride_sn, stride_sg, stride_zn, stride_zg, stride_xs, stride_xz,
    GROUP: tl.constexpr, TILES: tl.constexpr, UNROLL: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    WEIGHT_ZERO: tl.constexpr, INPUT_ZERO: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows beyond the last are read as others, and not stored.
    n_in = (n % N).to(tl.int64)
    m_in = (m % M).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    q_ptrs = q_ptr + n_in[:, None] * stride_qn
    x_ptrs = x_ptr + m_in[None, :] * stride_xm + inner[:, None] * stride_xk
    total = int8_products(
        x_ptrs, q_ptrs, scale_ptr + n_in * stride_sn, zero_ptr + n_in * stride_zn, x_zero_ptr + m_in * stride_xz, inner,
        K, G, stride_xk, stride_sg, stride_zg, GROUP, TILES, UNROLL, BITS, OFFSET, WEIGHT_ZERO, INPUT_ZERO, EVEN, ASM,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    total *= tl.load(x_scale_ptr + m_in * stride_xs).to(tl.float32)[None, :]
    store_tile(total, bias_ptr, y_ptr, m, n, n_in, M, N, BIAS)


class Int8Operands(GroupedCodes):
    """`GroupedCodes` that meet int8 codes (M, K), as a launch takes them; `others` have to be on the same device."""

    def __init__(
        self, op: str, xq: Tensor, xs: Tensor, xz: Tensor | None, qdata: Tensor, ws: Tensor, wz: Tensor | None,
        dtype: str, **others: Tensor | None,
    ) -> None:  # fmt: skip
        check_matrix(op, "xq", xq, (torch.int8,))
        m, k = xq.shape
        super().__init__(op, k, qdata, ws, wz, dtype)
        check_shape(op, "xs", xs, (m, 1), (1, 1))
        check_shape(op, "xz", xz, (m, 1), (1, 1))
        check_device(op, xq=xq, xs=xs, xz=xz, qdata=qdata, ws=ws, wz=wz, **others)
        unsigned8 = qdata.dtype == torch.uint8 and self.bits == 8
        if unsigned8 and wz is None:
            wz = torch.zeros_like(ws, dtype=torch.int32)
        zero, x_zero = ws if wz is None else wz, xs if xz is None else xz
        self.codes, self.scales, self.sizes = (xq, self.qdata), (ws, zero, xs, x_zero), (k, self.segment)
        steps = (*ws.stride(), *zero.stride(), row_step(xs), row_step(x_zero))
        self.steps = (*xq.stride(), self.qdata.stride(0), *steps)
        self.numerics = {
            "GROUP": self.group,
            "BITS": self.bits,
            "OFFSET": 128 if unsigned8 else self.offset,
            "WEIGHT_ZERO": wz is not None,
            "INPUT_ZERO": xz is not None,
        }

    def constants(self, config: LaunchConfig) -> dict[str, object]:
        """The constants of `int8_products` but BLOCK_M, with a group cut into tiles of about `block_k` columns."""
        block_k = min(config.block_k, power_of_two_in(self.segment, self.group))
        even = block_k >= 32 and self.whole_segments
        if not even:
            block_k = max(32, min(config.block_k, triton.next_power_of_2(self.group)))
        tiles = triton.cdiv(self.group, block_k)
        about = {"TILES": tiles, "UNROLL": tiles <= UNROLLED, "EVEN": even, "ASM": self.qdata.device.type == "cuda"}
        return {**self.numerics, **about, "BLOCK_N": config.block_n, "BLOCK_K": block_k}


def int8_grouped_mm(
    xq: Tensor, xs: Tensor, xz: Tensor | None, qdata: Tensor, ws: Tensor, wz: Tensor | None, weight_dtype: str,
    bias: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `cuda_int8_mm`; any strides. `bias` is added to the rounded result."""
    op = "int8_grouped_mm"
    xq = xq if xq.dim() != 2 or xq.stride(1) == 1 else xq.contiguous()
    operands = Int8Operands(op, xq, xs, xz, qdata, ws, wz, weight_dtype, bias=bias)
    (m, k), n = xq.shape, operands.n
    check_shape(op, "bias", bias, (n,))
    y = xq.new_empty(m, n, dtype=dtype)
    if not y.numel() or not k:
        return without_terms(y, bias)

    def run(config: LaunchConfig) -> None:
        _int8_grouped_mm[(triton.cdiv(n, config.block_n), triton.cdiv(m, config.block_m))](
            *operands.codes, y, *operands.scales, y if bias is None else bias, m, n, *operands.sizes, *operands.steps,
            **operands.constants(config), BIAS=bias is not None, BLOCK_M=config.block_m, **config.options,
            enable_fp_fusion=False,
        )  # fmt: skip

    launch(op, f"int{operands.bits}", (m, n, k), run, CANDIDATES, xq.device)
    return y
