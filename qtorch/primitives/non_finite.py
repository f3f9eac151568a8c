"""NaN and infinities: most codes cannot represent them, so scales carry them.

The scale of a block with a NaN or an infinity is NaN, and so is all that is computed with it. If the rows (tokens) of
an input share a scale, or the scale is given, each row gets a copy of it, which is NaN for rows with such a value; the
other rows are not affected. The float8 types have a NaN and need no copies: their codes are NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_non_finite(values: Tensor, source: Tensor) -> Tensor:
    """`values`, with NaN where `source`, which broadcasts to their shape, is NaN or infinite.

    A negative zero keeps its sign if that of `source` is negative too.
    """
    if torch.compiler.is_compiling():  # for inductor, zero times anything is zero
        return torch.where(source.abs() < torch.inf, values, torch.nan)
    return torch.add(values, source, alpha=0)


def lost_rows(x: Tensor) -> Tensor:
    """Column (M, 1) in fp32: NaN for each row of `x` (M, K) with a NaN or an infinity, 0 for all others."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], 1, dtype=torch.float32)
    # `isfinite` and norms of rows are ten times as slow on CPU.
    highest = x.abs().amax(1, keepdim=True).float()
    return with_non_finite(torch.zeros_like(highest), highest)


def finite_rows(x: Tensor) -> Tensor:
    """The rows of `x` (M, K) without a NaN or an infinity; `x` itself if all are."""
    kept = lost_rows(x).squeeze(1) == 0
    return x if bool(kept.all()) else x[kept]


def without_rows(x: Tensor, lost: Tensor) -> Tensor:
    """`x` (M, K) with zeros in the rows that are NaN in `lost`, the result of `lost_rows`."""
    return torch.where(lost == 0, x, 0)
