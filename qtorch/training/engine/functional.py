"""Any contraction of two tensors through the engine: `quantized_matmul`, `quantized_einsum`.

Each is reduced to products of matrices, (kept, contracted) on either side, by `contraction`. The gradient of the left
operand is computed by the spec's `grad_input`, that of the right one by its `grad_weight`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...dtypes.products import Product, batched, einsum_by
from .contraction import contraction
from .gemm_spec import TrainingSpec


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


# --------------------------------------------------------------------------------------------------
# Products with the matrices of experts through the engine: `F.grouped_mm`.
#
# Each group of rows is a contraction of its own, with its gradients; scales are those of its operands. The offsets are
# read on the host.


def grouped_mm_by(
    product: Product,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`F.grouped_mm` of these arguments, its matrices multiplied by `product`.

        (S, K), (E, K, N)      rows offs[e - 1] to offs[e] times matrix e; zeros after the last offset   (S, N)
        (E, M, K), (E, K, N)   without offsets                                                           (E, M, N)
        (M, K), (K, N)         the sum over k in offs[e - 1] to offs[e]                                  (E, M, N)
        (E, M, K), (K, N)      matrix e times columns offs[e - 1] to offs[e]                             (M, N)

    Raises:
        ValueError: a bias, which torch has none of either; offsets are missing, or not wanted.
    """
    both = mat_a.dim() == mat_b.dim() == 3
    if bias is not None or both is (offs is not None):
        raise ValueError("grouped_mm takes offs where an operand is a matrix, and no bias")
    if both:
        y = batched(mat_a, mat_b.transpose(1, 2), product)
    else:
        assert offs is not None
        stops: list[int] = offs.tolist()
        parts = list(zip([0, *stops], stops, strict=False))
        if mat_b.dim() == 3:
            matrices = mat_b.transpose(1, 2).unbind(0)
            of_groups = [product(mat_a[a:b], matrices[e]) for e, (a, b) in enumerate(parts) if b > a]
            y = torch.cat([*of_groups, mat_a.new_zeros(mat_a.shape[0] - max([0, *stops]), mat_b.shape[2])])
        elif mat_a.dim() == 3:
            y = torch.cat([product(mat_a[e], mat_b[:, a:b].t()) for e, (a, b) in enumerate(parts)], 1)
        else:
            y = torch.stack([product(mat_a[:, a:b], mat_b[a:b].t()) for a, b in parts])
    return y if out_dtype is None else y.to(out_dtype)


def quantized_grouped_mm(mat_a: Tensor, mat_b: Tensor, spec: TrainingSpec, offs: Tensor | None = None) -> Tensor:
    """`F.grouped_mm`: rows (S, K), sorted by expert, and matrices (E, K, N), those of expert e before ``offs[e]``.

    Other shapes, results and errors as in `grouped_mm_by`.
    """
    return grouped_mm_by(lambda a, b: contraction(a, b, spec), mat_a, mat_b, offs)


# --------------------------------------------------------------------------------------------------
# Scaled dot-product attention through the engine: its two products, each with its gradients.
#
#     scores[q, k] = sum_d query[q, d] key[k, d]          values  y[q, e] = sum_k p[q, k] value[k, e]
#
# with p the softmax of the scaled and masked scores, in floating point.


def attention_by(
    scores: Product,
    values: Product,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of these arguments, its matrices multiplied by `scores` and `values`.

    Args:
        query, key, value: (..., Q, D), (..., K, D) and (..., K, E); the leading axes broadcast.

    Raises:
        ValueError: a mask together with `is_causal`.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("scaled_dot_product_attention takes attn_mask or is_causal, not both")
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    weights = _of_matrices(scores, query, key) * factor
    if is_causal:
        attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        added = attn_mask.dtype != torch.bool
        weights = weights + attn_mask if added else weights.masked_fill(~attn_mask, -torch.inf)
    # A row whose keys are all masked attends to nothing.
    p = torch.softmax(weights, -1).masked_fill((weights == -torch.inf).all(-1, keepdim=True), 0)
    p = torch.dropout(p, dropout_p, True) if dropout_p else p
    return _of_matrices(values, p, value.transpose(-1, -2))


def _of_matrices(product: Product, lhs: Tensor, rhs: Tensor) -> Tensor:
    """(..., M, K) and (..., N, K) -> (..., M, N)."""
    batch = torch.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    lhs, rhs = lhs.expand(*batch, *lhs.shape[-2:]), rhs.expand(*batch, *rhs.shape[-2:])
    y = batched(lhs.reshape(-1, *lhs.shape[-2:]), rhs.reshape(-1, *rhs.shape[-2:]), product)
    return y.reshape(*batch, *y.shape[-2:])
