"""Quantization in tiles: one scale for each R x C block of a matrix.

    scale[i, j] = max(max |x| / L, tiny) over the block (i, j),    q[m, k] = round(x[m, k] * (1 / scale[m / R, k / C]))

1 x 128 for activations and 128 x 128 for weights (DeepSeek-V3, arXiv 2412.19437, section 3.3.2), 32 x 32 for both
(JetFire, arXiv 2403.12422, section 4), 1 x group for grouped weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...custom_ops import note
from .arguments import next_power_of_two
from .quantize import LARGEST, TINY, check_input, codes_of, magnitude_bits, scale_of


@triton.jit
def _quantize_tiles(
    x_ptr, q_ptr, scale_ptr, seed_ptr, M, K, stride_xm, stride_xk,
    LARGEST: tl.constexpr, TINY: tl.constexpr, STOCHASTIC: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # A program has TILES blocks, one below the other: axes (block, row, column).
    block = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    row = tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_C)
    rows = block[:, None, None] * R + row[None, :, None]
    columns = tl.program_id(1).to(tl.int64) * C + column[None, None, :]
    mask = (row[None, :, None] < R) & (rows < M) & (column[None, None, :] < C) & (columns < K)
    x = tl.load(x_ptr + rows * stride_xm + columns * stride_xk, mask=mask, other=0.0)
    scale = scale_of(tl.max(tl.max(magnitude_bits(x), 2), 1), LARGEST, TINY)
    inverse = tl.div_rn(1.0, scale)[:, None, None]
    zeros = tl.zeros([TILES, BLOCK_R, BLOCK_C], tl.int32)
    number, at = rows.to(tl.int32) + zeros, columns.to(tl.int32) + zeros
    q = codes_of(x, inverse, number, at, seed_ptr, LARGEST, STOCHASTIC, q_ptr.dtype.element_ty)
    tl.store(q_ptr + rows * K + columns, q, mask=mask)
    tl.store(scale_ptr + block * tl.num_programs(1) + tl.program_id(1), scale, mask=block * R < M)


def quantize_tilewise(
    x: Tensor, tile: tuple[int, int], dtype: torch.dtype = torch.int8, seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One scale a tile; equation at the top of the file.

    Args:
        x, dtype, seed: see `quantize_rowwise`.
        tile: (R, C), at most 16384 elements.

    Returns:
        codes (M, K), scale (M / R, K / C) fp32.

    Raises:
        ValueError: another dtype or shape, or tiles that do not divide x.
    """
    check_input("quantize_tilewise", x, dtype, seed)
    (m, k), (r, c) = x.shape, tile
    if r < 1 or c < 1 or m % r or k % c or r * c > 16384:
        raise ValueError(
            f"quantize_tilewise: tiles of {r} x {c} must divide the matrix and have at most 16384 elements, x has "
            f"shape {(m, k)}"
        )
    q, scale = x.new_empty(m, k, dtype=dtype), x.new_empty(m // r, k // c, dtype=torch.float32)
    note("triton.quantize_tilewise")
    if x.numel():
        block_r, block_c = next_power_of_two(r), next_power_of_two(c)
        tiles = max(1, 2048 // (block_r * block_c))
        _quantize_tiles[(triton.cdiv(m // r, tiles), k // c)](
            x, q, scale, scale if seed is None else seed, m, k, *x.stride(), LARGEST[dtype], TINY, seed is not None,
            r, c, tiles, block_r, block_c, num_warps=4 if block_r * block_c <= 4096 else 8, enable_fp_fusion=False,
        )  # fmt: skip
    return q, scale
