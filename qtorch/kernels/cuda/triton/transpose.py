"""A transposed copy of an 8-bit matrix, in tiles: torch's own reads or writes single bytes."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _transpose(x_ptr, y_ptr, M, N, stride_xm, stride_xn, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    x = tl.load(x_ptr + rows[:, None] * stride_xm + columns[None, :] * stride_xn, mask=mask)
    tl.store(y_ptr + columns[None, :] * M + rows[:, None], x, mask=mask)


def transposed_copy(x: Tensor) -> Tensor:
    """(M, N) of a dtype of one byte, any strides -> (N, M) contiguous."""
    m, n = x.shape
    y = x.new_empty(n, m)
    if x.numel():
        _transpose[(triton.cdiv(m, 128), triton.cdiv(n, 128))](x, y, m, n, *x.stride(), 128, num_warps=8)
    return y
