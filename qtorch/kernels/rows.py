"""Reshape a layer's input of any rank to a matrix, and its result back."""

from __future__ import annotations

from torch import Tensor


def to_rows(x: Tensor) -> Tensor:
    """(..., K) -> (M, K)."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def from_rows(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """(M, N) -> (..., N) with the leading axes of `x`, and the bias (N) added."""
    if bias is not None:
        y = y + bias
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], y.shape[-1])
