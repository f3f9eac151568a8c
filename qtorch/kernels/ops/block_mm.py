"""Products of two operands that both have blocks along the contracted axis (tiles of 32 x 32, say).

    y[m, n] = sum_g (sum_{k in g} xq[m, k] wq[n, k]) * ws[n, g] * xs[m, g]

The inner sum of int8 codes is an exact integer; the outer one runs in fp32 in the order of the groups g, the finer of
the two operands' blocks, so that the result does not depend on the machine. Symmetric codes only.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...primitives import Granularity, ZeroPointDomain, is_compiling, qdtype
from ..custom_ops import opaque
from . import int8_grouped_mm, int_matmul
from .weight_only_mm import dequantize_codes, weight_only_mm


@opaque(lambda xq, xs, wq, ws, dtype: xs.new_empty(xq.shape[0], wq.shape[0], dtype=dtype))
def int8_block_mm(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, dtype: torch.dtype) -> Tensor:
    """The equation above without bias.

    Args:
        xq: (M, K) int8 codes.  xs: (M / bm, Gx) scale of blocks of bm rows.
        wq: (N, K) int8 codes.  ws: (N / bn, Gw) scale.  The larger of Gx and Gw is a multiple of the other.
        dtype: of the result, (M, N).
    """
    if not (xq.numel() and wq.numel()):
        return xs.new_zeros(xq.shape[0], wq.shape[0], dtype=dtype)
    groups = max(xs.shape[1], ws.shape[1])
    if wq.shape[1] <= int_matmul.EXACT_SLICE * groups and xq.device.type == "cpu":
        return _sum_of_groups(xq.float(), wq.float(), xs, ws, groups, lambda x, w: torch.mm(x, w.t())).to(dtype)
    sums = lambda x, w: int8_grouped_mm.int8_sums(x.contiguous(), None, w.contiguous(), None).float()  # noqa: E731
    return _sum_of_groups(xq, wq, xs, ws, groups, sums).to(dtype)


def _sum_of_groups(
    x: Tensor, w: Tensor, xs: Tensor, ws: Tensor, groups: int, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The equation in fp32, (M, N), with ``product`` for the inner sums."""
    x_scale = _of_each_row(xs, x.shape[0], groups).unsqueeze(2)
    w_scale = _of_each_row(ws, w.shape[0], groups).unsqueeze(1)
    y = xs.new_zeros(x.shape[0], w.shape[0], dtype=torch.float32)
    for g, (xg, wg) in enumerate(zip(x.chunk(groups, 1), w.chunk(groups, 1), strict=True)):
        y.add_(product(xg, wg).mul_(w_scale[g]).mul_(x_scale[g]))
    return y


def _of_each_row(scale: Tensor, rows: int, groups: int) -> Tensor:
    """(G, rows) from a scale (blocks of rows, blocks of columns)."""
    scale = scale.float().repeat_interleave(rows // scale.shape[0], 0)
    return scale.repeat_interleave(groups // scale.shape[1], 1).t().contiguous()


def pad_to_blocks(x: Tensor, granularity: Granularity, columns: int = 1) -> Tensor:
    """`x` (M, K) with zeros appended, so that blocks divide it and `columns` divides K; zeros do not change a range."""
    rows, inner = granularity.pattern(2)
    rows, inner = max(rows, 1), math.lcm(max(inner, 1), columns)
    if rows == inner == 1:
        return x
    return with_zeros(x, -x.shape[1] % inner, -x.shape[0] % rows)


def with_zeros(x: Tensor, columns: int, rows: int = 0) -> Tensor:
    """`x` (M, K) with so many columns and rows of zeros appended."""
    if not is_compiling():
        return torch.nn.functional.pad(x, (0, columns, 0, rows)) if columns or rows else x
    # A graph accepts any number of rows, so it must not depend on how many are missing. It expects a contiguous result,
    # and torch copies a transposed tensor to which it adds nothing as it is.
    return torch.nn.functional.pad(x.contiguous(), (0, columns, 0, rows))


@opaque(lambda a, b, a_scale, b_scale, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype))
def tile_scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """c[m, n] = sum_t (sum_{k in t} a[m, k] * b[n, k]) * bs[n / S, t] * as[m / R, t], tile by tile; on CUDA by Triton,
    elsewhere, for float8, one product in fp32 of what the codes stand for.

    Args:
        a: (M, K) int8 or float8.  b: (N, K) int8, or a float8.
        a_scale: (M / R, T) fp32.  b_scale: (N / S, T) fp32. Their sizes divide those of the matrices.
        dtype: of the result, (M, N).
    """
    if a.dtype == torch.int8:
        return int8_block_mm(a, a_scale, b, b_scale, dtype)
    of_a, of_b = qdtype(a.dtype), qdtype(b.dtype)
    codes_of_a = a_scale, None, of_a, of_a.quant_min, of_a.quant_max, ZeroPointDomain.NONE
    reals = dequantize_codes(a, *codes_of_a, torch.float32)
    low, high = float(of_b.quant_min), float(of_b.quant_max)
    return weight_only_mm(reals, b, b_scale, None, of_b.name, low, high, "NONE").to(dtype)
