"""Any contraction through the engine, reduced to products of matrices, (kept, contracted) on either side.

Functions `..._by` take the product; `quantized_...` multiply by `contraction`, as a spec says. The gradient of the left
operand is computed by the spec's `grad_input`, that of the right one by its `grad_weight`.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...dtypes.conv import convolution
from ...dtypes.products import Product, batched, einsum_by
from ...kernels.conv import Size, Window, both_ends, multiply_windows, per_axis, to_matrix, with_bias
from ...primitives.affine import check_tensors
from .contraction import contraction
from .gemm_spec import TrainingSpec


def _product(function: str, spec: TrainingSpec, *operands: Tensor) -> Product:
    check_tensors(function, *operands)
    if not isinstance(spec, TrainingSpec):
        raise TypeError(f"{function} takes a TrainingSpec such as fully_quantized(8), got {spec!r:.60}")
    return lambda a, b: contraction(a, b, spec)


def quantized_matmul(lhs: Tensor, rhs: Tensor, spec: TrainingSpec) -> Tensor:
    """`torch.matmul(lhs, rhs)`: c[..., m, n] = sum_k lhs[..., m, k] rhs[..., k, n].

    Args:
        lhs: (..., K); any rank.
        rhs: (K, N) or (K,), or (..., K, N) with leading axes that broadcast against those of lhs.

    Raises:
        ValueError: the shapes do not fit.
    """
    product = _product("quantized_matmul", spec, lhs, rhs)
    if not lhs.dim() or not rhs.dim() or lhs.shape[-1] != rhs.shape[-2 if rhs.dim() > 1 else 0]:
        raise ValueError(f"quantized_matmul: shapes {tuple(lhs.shape)} and {tuple(rhs.shape)} do not fit")
    if rhs.dim() == 1:
        return quantized_matmul(lhs, rhs.unsqueeze(1), spec).squeeze(-1)
    if rhs.dim() == 2:
        return product(lhs.reshape(-1, lhs.shape[-1]), rhs.t()).reshape(*lhs.shape[:-1], rhs.shape[-1])
    if lhs.dim() == 1:
        return quantized_matmul(lhs.unsqueeze(0), rhs, spec).squeeze(-2)
    return batches_by(product, lhs, rhs.mT)


def quantized_einsum(equation: str, lhs: Tensor, rhs: Tensor, spec: TrainingSpec) -> Tensor:
    """`torch.einsum(equation, lhs, rhs)` for two operands, without ellipsis: ``"bsk,nk->bsn"``.

    Axes in both operands and not in the result are contracted; axes in all three are batch axes; an axis of one operand
    that is not in the result is summed first, exactly.

    Raises:
        ValueError: no such equation, or the shapes do not fit; the axis is named.
    """
    return einsum_by(_product("quantized_einsum", spec, lhs, rhs), str(equation), lhs, rhs)


def batches_by(product: Product, lhs: Tensor, rhs: Tensor) -> Tensor:
    """(..., M, K) and (..., N, K) -> (..., M, N); leading axes broadcast."""
    batch = torch.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    lhs, rhs = lhs.expand(*batch, *lhs.shape[-2:]), rhs.expand(*batch, *rhs.shape[-2:])
    y = batched(lhs.reshape(-1, *lhs.shape[-2:]), rhs.reshape(-1, *rhs.shape[-2:]), product)
    return y.reshape(*batch, *y.shape[-2:])


def grouped_mm_by(
    product: Product, mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`F.grouped_mm` of these arguments: each group of rows is a product of its own, with its scales. The offsets are
    read on the host.

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
    return grouped_mm_by(_product("quantized_grouped_mm", spec, mat_a, mat_b), mat_a, mat_b, offs)


def attention_by(
    scores: Product, values: Product, query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention` of these arguments, its two products by `scores` and `values`:

        scores[q, k] = sum_d query[q, d] key[k, d]          values  y[q, e] = sum_k p[q, k] value[k, e]

    with p the softmax of the scaled and masked scores, in floating point.

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
    weights = batches_by(scores, query, key) * factor
    if is_causal:
        attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        added = attn_mask.dtype != torch.bool
        weights = weights + attn_mask if added else weights.masked_fill(~attn_mask, -torch.inf)
    # A row whose keys are all masked attends to nothing.
    p = torch.softmax(weights, -1).masked_fill((weights == -torch.inf).all(-1, keepdim=True), 0)
    p = torch.dropout(p, dropout_p, True) if dropout_p else p
    return batches_by(values, p, value.transpose(-1, -2))


def conv_by(product: Product, ndim: int, *args: Any, **kwargs: Any) -> Tensor:
    """`F.conv1d`, `F.conv2d` or `F.conv3d` of these arguments, as a contraction over (kernel position, input channel).
    Windows of the input are gathered into rows, one for each output position, so that a scale per row is one for each
    window; the weight is a matrix (N, T * C), so that one per row is one for each output channel. See
    `kernels.conv`."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
        matrices = to_matrix(weight).chunk(window.groups, 0)
        return with_bias(multiply_windows(x, window, lambda rows, group: product(rows, matrices[group])), bias)

    return convolution(ndim, f"quantized_conv{ndim}d", run)(*args, **kwargs)


def conv_transpose_by(
    product: Product, ndim: int, input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Size = 1, padding: Size = 0, output_padding: Size = 0, groups: int = 1, dilation: Size = 1,
) -> Tensor:  # fmt: skip
    """`F.conv_transpose1d`, `2d` or `3d` of these arguments: the convolution of the input with zeros between its
    elements, and the weight flipped along its kernel; `ValueError` where the shapes do not fit."""
    if input.dim() == ndim + 1:
        options = (stride, padding, output_padding, groups, dilation)
        return conv_transpose_by(product, ndim, input.unsqueeze(0), weight, bias, *options).squeeze(0)
    if input.dim() != ndim + 2 or weight.dim() != ndim + 2 or input.shape[1] != weight.shape[0]:
        raise ValueError(
            f"conv_transpose{ndim}d: an input of shape {tuple(input.shape)} does not fit a weight of shape "
            f"{tuple(weight.shape)}, (C, N / groups, *kernel)"
        )
    steps, ends, extra, spread = (per_axis(each, ndim) for each in (stride, padding, output_padding, dilation))
    kernel = weight.shape[2:]
    for axis, step in enumerate(steps, 2):
        if step > 1:  # zeros between the elements
            input = pad(input.unsqueeze(axis + 1), [0, 0] * (input.dim() - axis - 1) + [0, step - 1])
            input = input.flatten(axis, axis + 1)
            input = input.narrow(axis, 0, input.shape[axis] - (step - 1))
    before = [d * (k - 1) - p for d, k, p in zip(spread, kernel, ends, strict=True)]
    widths = both_ends(before)
    for axis in range(ndim):
        widths[2 * (ndim - 1 - axis) + 1] += extra[axis]
    # (C, N / groups, *kernel) -> (N, C / groups, *kernel)
    flipped = weight.flip(tuple(range(2, ndim + 2))).unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return conv_by(product, ndim, pad(input, widths), flipped, bias, 1, 0, dilation, groups)


class Convolution(Protocol):
    """A convolution of torch, or a transposed one, and the spec of its three matmuls; the rest is torch's."""

    def __call__(
        self, input: Tensor, weight: Tensor, spec: TrainingSpec, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor: ...


def _quantized(by: Callable[..., Tensor], name: str, axes: str, weight: str) -> Any:
    """`F.conv1d` and its kin, which `by` runs, with a spec for the three matmuls."""
    ndim = axes.count(",") + 1

    def conv(input: Tensor, weight: Tensor, spec: TrainingSpec, *args: Any, **kwargs: Any) -> Tensor:
        return by(_product(f"quantized_{name}", spec, input, weight), ndim, input, weight, *args, **kwargs)

    conv.__name__ = conv.__qualname__ = f"quantized_{name}"
    kernel = ", ".join(["T"] * ndim)
    conv.__doc__ = f"`F.{name}`: input (B, C, {axes}) or (C, {axes}), weight ({weight}, {kernel})."
    return conv


quantized_conv1d: Convolution = _quantized(conv_by, "conv1d", "L", "N, C / groups")
quantized_conv2d: Convolution = _quantized(conv_by, "conv2d", "H, W", "N, C / groups")
quantized_conv3d: Convolution = _quantized(conv_by, "conv3d", "D, H, W", "N, C / groups")
quantized_conv_transpose1d: Convolution = _quantized(conv_transpose_by, "conv_transpose1d", "L", "C, N / groups")
quantized_conv_transpose2d: Convolution = _quantized(conv_transpose_by, "conv_transpose2d", "H, W", "C, N / groups")
quantized_conv_transpose3d: Convolution = _quantized(conv_transpose_by, "conv_transpose3d", "D, H, W", "C, N / groups")
