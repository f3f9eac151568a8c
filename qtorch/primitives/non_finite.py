"""NaN and infinities: most codes cannot represent them, so scales carry them.

A block that holds a NaN or an infinity has NaN for a scale, and so does all that is computed with it. Where a scale is
shared by the rows (tokens) of an input, or given, each row gets a copy of it, NaN for the rows that hold such a value:
the other rows stay as they are. Types that have a NaN, the float8 ones, need no copies: their codes are NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_non_finite(values: Tensor, source: Tensor) -> Tensor:
    """`values`, and NaN where `source`, of a shape that broadcasts to theirs, is NaN or infinite. Zeros keep their sign
    where it is that of `source`."""
    if torch.compiler.is_compiling():  # for inductor, zero times anything is zero
        return torch.where(source.abs() < torch.inf, values, torch.nan)
    return torch.add(values, source, alpha=0)


def lost_rows(x: Tensor) -> Tensor:
    """(M, 1) fp32: NaN for each row of `x` (M, K) that holds a NaN or an infinity, 0 for all others."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], 1, dtype=torch.float32)
    # `isfinite` and norms of rows are ten times as slow on CPU.
    highest = x.abs().amax(1, keepdim=True).float()
    return with_non_finite(torch.zeros_like(highest), highest)


def without_rows(x: Tensor, lost: Tensor) -> Tensor:
    """`x` (M, K) with zeros for the rows that `lost_rows` names."""
    return torch.where(lost == 0, x, 0)
