"""Product of int8 or float8 matrices with a scale for each tile of either.

    c[m, n] = sum_t (sum_{k in t} a[m, k] * b[n, k]) * bs[n / S, t] * as[m / R, t]

t runs over the tiles of the contracted axis, which the two share: 1 x 128 of a with 128 x 128 of b (DeepSeek-V3, arXiv
2412.19437, section 3.3.2), 32 x 32 of both (JetFire, arXiv 2403.12422, section 4). The inner sum is an exact int32, or
in fp32 for float8; the outer one is in fp32, in order, without fused multiply-add.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch_config import LaunchConfig, launch
from .launch import FLOATS, check_device, check_matrix, power_of_two_in, tile_of

CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)

CANDIDATES = [
    LaunchConfig(m, n, 128, num_warps=w, num_stages=s)
    for m, n, w in ((16, 64, 4), (64, 64, 4), (64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8))
    for s in (3, 4)
]
"""What `autotune` tries."""

UNROLLED = 4
"""Steps within a tile that are unrolled; more are a loop."""


@triton.jit
def _add_step(part, a_ptrs, b_ptrs, k, inner, stride_ak, stride_bk, TILE: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        a = tl.load(a_ptrs + k * stride_ak)
        b = tl.load(b_ptrs + k * stride_bk)
    else:
        a = tl.load(a_ptrs + k * stride_ak, mask=(k + inner < TILE)[None, :], other=0.0)
        b = tl.load(b_ptrs + k * stride_bk, mask=(k + inner < TILE)[:, None], other=0.0)
    return tl.dot(a, b, part, out_dtype=part.dtype)


@triton.jit
def _tile_scaled_mm(
    a_ptr, b_ptr, c_ptr, a_scale_ptr, b_scale_ptr, M, N, K,
    stride_am, stride_ak, stride_bn, stride_bk, stride_asm, stride_ask, stride_bsn, stride_bsk,
    TILE: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    sums: tl.constexpr = tl.int32 if a_ptr.dtype.element_ty == tl.int8 else tl.float32
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the last are read as others, and not stored.
    m_in = (m % M).to(tl.int64)
    n_in = (n % N).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + m_in[:, None] * stride_am + inner[None, :] * stride_ak
    b_ptrs = b_ptr + n_in[None, :] * stride_bn + inner[:, None] * stride_bk
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(0, K // TILE):
        part = tl.zeros([BLOCK_M, BLOCK_N], sums)
        if UNROLL:
            for step in tl.static_range(STEPS):
                part = _add_step(part, a_ptrs, b_ptrs, step * BLOCK_K, inner, stride_ak, stride_bk, TILE, EVEN)
        else:
            for step in range(STEPS):
                part = _add_step(part, a_ptrs, b_ptrs, step * BLOCK_K, inner, stride_ak, stride_bk, TILE, EVEN)
        a_scale = tl.load(a_scale_ptr + m_in // ROWS * stride_asm + tile * stride_ask)
        if COLUMNS % BLOCK_N == 0:
            b_scale = tl.load(b_scale_ptr + tile_n * BLOCK_N // COLUMNS * stride_bsn + tile * stride_bsk)
            total += part.to(tl.float32) * b_scale * a_scale[:, None]
        else:
            b_scale = tl.load(b_scale_ptr + n_in // COLUMNS * stride_bsn + tile * stride_bsk)
            total += part.to(tl.float32) * b_scale[None, :] * a_scale[:, None]
        a_ptrs += TILE * stride_ak
        b_ptrs += TILE * stride_bk
    y = total.to(c_ptr.dtype.element_ty)
    tl.store(c_ptr + m[:, None].to(tl.int64) * N + n[None, :], y, mask=(m[:, None] < M) & (n[None, :] < N))


def tile_scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `tile_scaled_mm` of `ops.block_mm`; any strides, row-major is fast."""
    op = "tile_scaled_mm"
    check_matrix(op, "a", a, CODES)
    check_matrix(op, "b", b, (a.dtype,))
    (m, k), n = a.shape, b.shape[0]
    if b.shape[1] != k or dtype not in FLOATS:
        raise ValueError(
            f"{op} takes (M, K), (N, K) and a float dtype, got {tuple(a.shape)}, {tuple(b.shape)}, {dtype}"
        )
    for name, scale, rows in (("a_scale", a_scale, m), ("b_scale", b_scale, n)):
        check_matrix(op, name, scale, (torch.float32,))
        blocks, tiles = scale.shape
        whole = tiles == a_scale.shape[1] and not rows % max(blocks, 1) and not k % max(tiles, 1)
        if not whole or bool(rows) > bool(blocks) or bool(k) > bool(tiles):
            raise ValueError(
                f"{op}: {name} has shape {(blocks, tiles)}; its sizes must divide those of the matrix, {(rows, k)}, "
                f"and both scales have the same number of tiles of K; a_scale has {tuple(a_scale.shape)}"
            )
    check_device(op, a=a, b=b, a_scale=a_scale, b_scale=b_scale)
    c = a.new_empty(m, n, dtype=dtype)
    if not c.numel() or not k:
        return c.zero_()
    tile = k // a_scale.shape[1]

    def run(config: LaunchConfig) -> None:
        block_k = min(config.block_k, power_of_two_in(tile))
        even = block_k >= 32
        if not even:
            block_k = max(32, min(config.block_k, triton.next_power_of_2(tile)))
        steps = triton.cdiv(tile, block_k)
        grid = (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n),)
        _tile_scaled_mm[grid](
            a, b, c, a_scale, b_scale, m, n, k, *a.stride(), *b.stride(),
            *a_scale.stride(), *b_scale.stride(), TILE=tile, STEPS=steps, UNROLL=steps <= UNROLLED,
            ROWS=m // a_scale.shape[0], COLUMNS=n // b_scale.shape[0], EVEN=even,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=block_k, GROUP_M=config.group_m,
            **config.options, enable_fp_fusion=False,
        )  # fmt: skip

    launch(op, str(a.dtype).removeprefix("torch."), (m, n, k), run, CANDIDATES, a.device)
    return c
