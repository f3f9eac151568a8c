"""Balanced operands: what is large in one operand is moved into the other one before both are quantized.

    c[a, b] = sum_c (lhs[a, c] / m[c]) (rhs[b, c] m[c]),   m[c] = max_a |lhs[a, c]|^alpha / max_b |rhs[b, c]|^beta

The product stays the same; outliers along the contracted axis are shared by the two operands, as SmoothQuant (Xiao et
al., arXiv 2211.10438, eq. 4) does it with fixed weights, here on each call (AQT, `mid_quant`). A maximum of zero counts
as one.
"""

from __future__ import annotations

import torch
from torch import Tensor

MidAlpha = tuple[float, float]
"""(alpha, beta)"""


def balanced(lhs: Tensor, rhs: Tensor, alphas: MidAlpha | None) -> tuple[Tensor, Tensor]:
    """`lhs` (A, C) and `rhs` (B, C), balanced by the equation above; as they are for None."""
    if alphas is None:
        return lhs, rhs
    factor = _largest(lhs) ** alphas[0] / _largest(rhs) ** alphas[1]
    return (lhs / factor).to(lhs.dtype), (rhs * factor).to(rhs.dtype)


def _largest(x: Tensor) -> Tensor:
    """Of each contracted index, (1, C), fp32. A token that is not finite must not reach the other tokens."""
    magnitude = torch.where(x.isfinite().all(1, keepdim=True), x.abs(), 0).float()
    largest = magnitude.amax(0, keepdim=True) if x.shape[0] else magnitude.new_zeros(1, x.shape[1])
    return torch.where(largest > 0, largest, 1.0)
