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
from .launch import check_device, check_matrix, check_shape, next_power_of_two, power_of_two_divisor
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
    """A tile of y' before the scales of x.

    The pointers are those of the rows of a tile: `x_ptrs` (BLOCK_K, BLOCK_M) and `q_ptrs` (BLOCK_N, 1) at the first
    column, `scale_rows` and `zero_rows` (BLOCK_N) at the first group, `x_zero_rows` (BLOCK_M); `inner` is 0 to BLOCK_K.
    """
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
    y = (total * tl.load(x_scale_ptr + m_in * stride_xs).to(tl.float32)[None, :]).to(y_ptr.dtype.element_ty)
    if BIAS:
        bias = tl.load(bias_ptr + n_in)[:, None]
        y = (y.to(tl.float32) + bias.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[None, :].to(tl.int64) * N + n[:, None], y, mask=(n[:, None] < N) & (m[None, :] < M))


class Int8Operands:
    """int8 codes (M, K) and integer codes (N, K) of 1 to 8 bits, 1 to 7 of them packed, with scales and zero points, as
    a launch takes them.

    Args:
        op: name for messages.
        xq, xs, xz, qdata, ws, wz, bits, signed: see `int8_grouped_mm`.
        others: further tensors that have to be on the same device.

    Raises:
        ValueError: other dtypes, shapes or devices.
    """

    def __init__(
        self,
        op: str,
        xq: Tensor,
        xs: Tensor,
        xz: Tensor | None,
        qdata: Tensor,
        ws: Tensor,
        wz: Tensor | None,
        bits: int,
        signed: bool,
        **others: Tensor | None,
    ) -> None:
        check_matrix(op, "xq", xq, (torch.int8,))
        check_matrix(op, "qdata", qdata, (torch.uint8,) if bits < 8 else (torch.int8, torch.uint8))
        (m, k), n = xq.shape, qdata.shape[0]
        if not 1 <= bits <= 8:
            raise ValueError(f"{op} takes codes of 1 to 8 bits, got {bits}")
        segment = k if bits == 8 else -(-k // 8)
        check_shape(op, "qdata", qdata, (n, k if bits == 8 else segment * bits))
        if ws.dim() != 2 or ws.shape[0] != n or not ws.shape[1] or k % ws.shape[1]:
            raise ValueError(
                f"{op}: ws must have shape (N, groups), groups dividing K, got {tuple(ws.shape)} for N, K = {(n, k)}"
            )
        check_shape(op, "wz", wz, tuple(ws.shape))
        check_shape(op, "xs", xs, (m, 1), (1, 1))
        check_shape(op, "xz", xz, (m, 1), (1, 1))
        check_device(op, xq=xq, xs=xs, xz=xz, qdata=qdata, ws=ws, wz=wz, **others)
        qdata = qdata if qdata.stride(1) == 1 else qdata.contiguous()
        unsigned8 = qdata.dtype == torch.uint8 and bits == 8
        if unsigned8 and wz is None:
            wz = torch.zeros_like(ws, dtype=torch.int32)
        zero, x_zero = ws if wz is None else wz, xs if xz is None else xz
        self.codes, self.scales, self.sizes = (xq, qdata), (ws, zero, xs, x_zero), (k, segment)
        self.steps = (*xq.stride(), qdata.stride(0), *ws.stride(), *zero.stride(),
                      *(t.stride(0) if t.shape[0] > 1 else 0 for t in (xs, x_zero)))  # fmt: skip
        self.group = k // ws.shape[1]
        self.numerics = {
            "GROUP": self.group,
            "BITS": bits,
            "OFFSET": 128 if unsigned8 else 2 ** (bits - 1) if bits < 8 and signed else 0,
            "WEIGHT_ZERO": wz is not None,
            "INPUT_ZERO": xz is not None,
        }

    def tiles(self, wanted: int) -> dict[str, int]:
        """How a group is cut into tiles of about `wanted` columns."""
        k, segment = self.sizes
        block_k = min(wanted, power_of_two_divisor(segment, self.group))
        even = block_k >= 32 and k in (segment, 8 * segment)
        if not even:
            block_k = max(32, min(wanted, next_power_of_two(self.group)))
        tiles = triton.cdiv(self.group, block_k)
        return {"TILES": tiles, "UNROLL": tiles <= UNROLLED, "EVEN": even, "BLOCK_K": block_k}


def int8_grouped_mm(
    xq: Tensor,
    xs: Tensor,
    xz: Tensor | None,
    qdata: Tensor,
    ws: Tensor,
    wz: Tensor | None,
    bits: int,
    signed: bool,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The equation at the top of the file.

    Args:
        xq: (M, K) int8, any strides.
        xs: (M, 1) or (1, 1) scale of x.  xz: zero point like it, or None.
        qdata: codes (N, K) of `bits` bits: 8, int8 or uint8; fewer, uint8, packed along rows by `pack_codes`.
        ws: (N, groups), groups dividing K.  wz: zero point like it, or None.
        bits: 1 to 8.
        signed: whether packed codes are signed, and so offset by 2^(bits-1).
        dtype: of the result: fp32, fp16 or bf16.
        bias: (N,), added to the rounded result; or None.

    Returns:
        (M, N).

    Raises:
        ValueError: other dtypes, shapes or devices.
    """
    op = "int8_grouped_mm"
    xq = xq if xq.dim() != 2 or xq.stride(1) == 1 else xq.contiguous()
    operands = Int8Operands(op, xq, xs, xz, qdata, ws, wz, bits, signed, bias=bias)
    (m, k), n = xq.shape, qdata.shape[0]
    check_shape(op, "bias", bias, (n,))
    y = xq.new_empty(m, n, dtype=dtype)
    if not y.numel() or not k:
        return y.zero_() if bias is None else y.copy_(bias.expand(m, n))

    def run(config: LaunchConfig) -> None:
        _int8_grouped_mm[(triton.cdiv(n, config.block_n), triton.cdiv(m, config.block_m))](
            *operands.codes, y, *operands.scales, y if bias is None else bias, m, n, *operands.sizes, *operands.steps,
            **operands.numerics, **operands.tiles(config.block_k), BIAS=bias is not None, ASM=xq.device.type == "cuda",
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps, num_stages=config.num_stages,
            enable_fp_fusion=False,
        )  # fmt: skip

    launch(op, f"int{bits}", (m, n, k), run, CANDIDATES, xq.device)
    return y
