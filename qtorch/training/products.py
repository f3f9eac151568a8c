"""Any contraction of two tensors through the engine: `quantized_matmul`, `quantized_einsum`.

Each is brought to matrices, (kept, contracted) on either side, and then is `gemm.contraction`. The gradient of the left
operand is the spec's `grad_input`, that of the right one its `grad_weight`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .gemm import contraction
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
    y = _batched(lhs.reshape(-1, *lhs.shape[-2:]), rhs.reshape(-1, *rhs.shape[-2:]).transpose(1, 2), _contraction(spec))
    return y.reshape(*batch, *y.shape[-2:])


class _Axes(NamedTuple):
    """The letters of an einsum, by what becomes of them."""

    batch: str
    lhs: str
    rhs: str
    contracted: str
    result: str


Product = Callable[[Tensor, Tensor], Tensor]
"""c[m, n] = sum_k a[m, k] b[n, k]"""


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


def einsum_by(product: Product, equation: str, lhs: Tensor, rhs: Tensor) -> Tensor:
    """`quantized_einsum` whose matrices are multiplied by `product`."""
    axes, left, right = _parse(equation)
    sizes = _sizes({left: lhs, right: rhs}.items() if left != right else [(left, lhs), (right, rhs)], equation)
    lhs, left = _sum_lone_axes(lhs, left, set(right) | set(axes.result))
    rhs, right = _sum_lone_axes(rhs, right, set(left) | set(axes.result))
    a = _permuted(lhs, left, axes.batch + axes.lhs + axes.contracted)
    b = _permuted(rhs, right, axes.batch + axes.rhs + axes.contracted)

    def size(letters: str) -> int:
        return math.prod([sizes[letter] for letter in letters])

    inner = size(axes.contracted)
    a = a.reshape(*((size(axes.batch),) if axes.batch else ()), size(axes.lhs), inner)
    b = b.reshape(*((size(axes.batch),) if axes.batch else ()), size(axes.rhs), inner)
    y = _batched(a, b, product) if axes.batch else product(a, b)
    order = axes.batch + axes.lhs + axes.rhs
    y = y.reshape([sizes[letter] for letter in order])
    return _permuted(y, order, axes.result)


def _batched(lhs: Tensor, rhs: Tensor, product: Product) -> Tensor:
    """(B, M, K) and (B, N, K) -> (B, M, N)."""
    if not lhs.shape[0]:
        return lhs.new_zeros(0, lhs.shape[1], rhs.shape[1])
    return torch.stack([product(a, b) for a, b in zip(lhs.unbind(0), rhs.unbind(0), strict=True)])


def _parse(equation: str) -> tuple[_Axes, str, str]:
    terms, arrow, result = equation.replace(" ", "").partition("->")
    left, comma, right = terms.partition(",")
    if not comma or "," in right or "." in equation:
        raise ValueError(f"quantized_einsum takes two operands and no ellipsis, got {equation!r}")
    if not arrow:
        result = "".join(sorted(letter for letter in {*left, *right} if (left + right).count(letter) == 1))
    for term in (left, right, result):
        for letter in term:
            if term.count(letter) > 1:
                raise ValueError(f"quantized_einsum: axis {letter!r} is repeated in {term!r} ({equation!r})")
    for letter in result:
        if letter not in left + right:
            raise ValueError(f"quantized_einsum: axis {letter!r} of the result is in neither operand ({equation!r})")
    shared = [letter for letter in left if letter in right]
    axes = _Axes(
        batch="".join(letter for letter in shared if letter in result),
        lhs="".join(letter for letter in left if letter not in right and letter in result),
        rhs="".join(letter for letter in right if letter not in left and letter in result),
        contracted="".join(letter for letter in shared if letter not in result),
        result=result,
    )
    if not axes.contracted:
        raise ValueError(f"quantized_einsum: {equation!r} contracts no axis; there is no sum to quantize for")
    return axes, left, right


def _sizes(terms: object, equation: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for term, tensor in terms:  # type: ignore[attr-defined]
        if tensor.dim() != len(term):
            raise ValueError(
                f"quantized_einsum: {term!r} of {equation!r} has {len(term)} axes, got shape {tuple(tensor.shape)}"
            )
        for letter, size in zip(term, tensor.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"quantized_einsum: axis {letter!r} of {equation!r} is {sizes[letter]} and {size}")
    return sizes


def _sum_lone_axes(x: Tensor, term: str, used: set[str]) -> tuple[Tensor, str]:
    lone = [i for i, letter in enumerate(term) if letter not in used]
    if not lone:
        return x, term
    return x.sum(lone), "".join(letter for letter in term if letter in used)


def _permuted(x: Tensor, order: str, wanted: str) -> Tensor:
    return x if order == wanted else x.permute([order.index(letter) for letter in wanted])
