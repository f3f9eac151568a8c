"""Scaled dot-product attention through the engine: its two products, each with its gradients.

    scores[q, k] = sum_d query[q, d] key[k, d]          values  y[q, e] = sum_k p[q, k] value[k, e]

with p the softmax of the scaled and masked scores, in floating point.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...dtypes.einsum import Product, batched


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
