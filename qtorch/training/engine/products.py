"""Any contraction of two tensors through the engine: `quantized_matmul`, `quantized_einsum`.

Each is reduced to products of matrices, (kept, contracted) on either side, by `contraction`. The gradient of the left
operand is computed by the spec's `grad_input`, that of the right one by its `grad_weight`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dtypes.einsum import Product, batched, einsum_by
from .contraction import contraction
from .spec import TrainingSpec


def quantized_matmul(lhs: Tensor, rhs: Tensor, spec: TrainingSpec) -> Tensor:
    """`torch.matmul(lhs, rhs)`: c[..., m, n] = sum_k lhs[..., m, k] rhs[..., k, n].

    Args:
        lhs: (..., K); any rank.
        rhs: (K, N) or (K,), or (..., K, N) with leading axes that broadcast against those of lhs.

    Raises:
        ValueError: the shapes do not fit.
    """
    if not lhs.dim() or not rhs.dim() or lhs.shape[-1] != rhs.shape[-2 if rhs.dim() > 1 else 0]:
        raise ValueError(f"quantized_matmul: shapes {tuple(lhs.shape)} and {tuple(rhs.shape)} do not fit")
    if rhs.dim() == 1:
        return quantized_matmul(lhs, rhs.unsqueeze(1), spec).squeeze(-1)
    if rhs.dim() == 2:
        y = contraction(lhs.reshape(-1, lhs.shape[-1]), rhs.t(), spec)
        return y.reshape(*lhs.shape[:-1], rhs.shape[-1])
    if lhs.dim() == 1:
        return quantized_matmul(lhs.unsqueeze(0), rhs, spec).squeeze(-2)
    batch = torch.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    lhs = lhs.expand(*batch, *lhs.shape[-2:])
    rhs = rhs.expand(*batch, *rhs.shape[-2:])
    y = batched(lhs.reshape(-1, *lhs.shape[-2:]), rhs.reshape(-1, *rhs.shape[-2:]).transpose(1, 2), _contraction(spec))
    return y.reshape(*batch, *y.shape[-2:])


def quantized_einsum(equation: str, lhs: Tensor, rhs: Tensor, spec: TrainingSpec) -> Tensor:
    """`torch.einsum(equation, lhs, rhs)` for two operands, without ellipsis: ``"bsk,nk->bsn"``.

    Axes in both operands and not in the result are contracted; axes in all three are batch axes; an axis of one operand
    that is not in the result is summed first, exactly.

    Raises:
        ValueError: no such equation, or the shapes do not fit; the axis is named.
    """
    return einsum_by(_contraction(spec), equation, lhs, rhs)


def _contraction(spec: TrainingSpec) -> Product:
    return lambda a, b: contraction(a, b, spec)
