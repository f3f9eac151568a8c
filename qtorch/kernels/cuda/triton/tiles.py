"""Which tile of a result a program computes."""

import triton
import triton.language as tl


@triton.jit
def tile_of(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(row, column) of the tile of program number `program`: column by column within bands of GROUP_M rows of tiles, so
    that programs that run together read the same rows and columns from the L2 cache."""
    rows = tl.cdiv(M, BLOCK_M)
    columns = tl.cdiv(N, BLOCK_N)
    band = program // (GROUP_M * columns)
    height = min(rows - band * GROUP_M, GROUP_M)
    within = program % (GROUP_M * columns)
    return band * GROUP_M + within % height, within // height
