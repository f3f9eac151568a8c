"""Rows of matrices: a layer's input of any rank, its result in the input's shape, and scales that rows share."""

from __future__ import annotations

import torch
from torch import Tensor

unsafe_view = torch.ops.aten._unsafe_view.default


def to_rows(x: Tensor) -> Tensor:
    """(..., K) -> (M, K)."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def from_rows(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """(M, N) -> (..., N) with the leading axes of `x`, and the bias (N) added."""
    if bias is not None:
        y = y + bias
    return fresh(y) if x.dim() == 2 else unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


def fresh(y: Tensor) -> Tensor:
    """`y`, whose memory nobody else reads, as a tensor that is no view to autograd, without a copy.

    A view that an `autograd.Function` returns, or that was made without gradients, refuses to be changed in place.
    """
    return unsafe_view(y, y.shape) if torch.compiler.is_compiling() or y._is_view() else y


def power_if_larger(rows: Tensor, limit: float, power: float) -> Tensor:
    """(M, 1) in the dtype of `rows` (M, K): `power` for those with a number above `limit`, 1 for all others."""
    highest = rows.amax(1, keepdim=True) if rows.shape[1] else rows.new_zeros(rows.shape[0], 1)
    return torch.ones_like(highest).masked_fill(highest > limit, power)


def scale_per_row(scale: Tensor, rows: int) -> Tensor:
    """A scale, or zero point, (R, G) of R equal blocks of `rows` rows, one block for a scale per tensor: (rows, G)."""
    if scale.shape[0] == rows:
        return scale
    return scale.expand(rows, -1) if scale.shape[0] == 1 else scale.repeat_interleave(rows // scale.shape[0], 0)
