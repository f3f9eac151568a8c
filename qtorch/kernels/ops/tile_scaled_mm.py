"""Product of int8 or float8 matrices with a scale for each tile of either.

    c[m, n] = sum_t (sum_{k in t} a[m, k] * b[n, k]) * bs[n / S, t] * as[m / R, t]

Computed tile by tile; on CUDA by Triton (`cuda/tile_scaled_mm.py`). The sums of int8 are exact, so the bits agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..custom_ops import opaque


@opaque(lambda a, b, a_scale, b_scale, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype))
def tile_scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The equation above.

    Args:
        a: (M, K) int8 or float8.  b: (N, K) of the same dtype.
        a_scale: (M / R, T) fp32.  b_scale: (N / S, T) fp32. Their sizes divide those of the matrices.
        dtype: of the result, (M, N).
    """
    if not (a.numel() and b.numel()):
        return a.new_zeros(a.shape[0], b.shape[0], dtype=dtype)
    tiles, m, n = a_scale.shape[1], a.shape[0], b.shape[0]
    rows, columns = a_scale.repeat_interleave(m // a_scale.shape[0], 0), b_scale.repeat_interleave(n // len(b_scale), 0)
    # fp64 holds the sums of int8 exactly; fp32 is accurate enough for float8.
    wide = torch.float64 if a.dtype == torch.int8 else torch.float32
    total = a.new_zeros(m, n, dtype=torch.float32)
    for tile, (at, bt) in enumerate(zip(a.to(wide).chunk(tiles, 1), b.to(wide).chunk(tiles, 1), strict=True)):
        total += torch.mm(at, bt.t()).float() * columns[:, tile] * rows[:, tile, None]
    return total.to(dtype)
