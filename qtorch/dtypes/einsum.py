"""`torch.einsum` of two operands, computed by matrix products.

A frozen weight that quantizes its input needs this: the gradient of torch's own products would multiply by the same
weight, and so quantize the gradient like an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import QuantizedTensor
from .dispatch import implements_function
from .linear import linear


@implements_function(torch.einsum)
def einsum(equation: str, *operands: Any) -> Tensor:
    """`torch.einsum` with quantized operands; it calls `linear` if one of two operands quantizes its input.

    Raises:
        ValueError: the shapes do not fit; or, with such an operand, the equation has an ellipsis or contracts no axis.
    """
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    weights = [isinstance(operand, QuantizedTensor) and operand.scheme.activation is not None for operand in operands]
    if len(operands) == 2 and weights == [False, True]:
        return einsum_by(linear, equation, *operands)
    if len(operands) == 2 and weights == [True, False]:
        terms, arrow, result = equation.partition("->")
        first, _, second = terms.partition(",")
        return einsum_by(linear, f"{second},{first}{arrow}{result}", operands[1], operands[0])
    with torch._C.DisableTorchFunctionSubclass():
        return torch.einsum(equation, *operands)


class _Axes(NamedTuple):
    """The letters of an einsum, by the role of their axes."""

    batch: str
    lhs: str
    rhs: str
    contracted: str
    result: str


Product = Callable[[Tensor, Tensor], Tensor]
"""c[m, n] = sum_k a[m, k] b[n, k]"""


def einsum_by(product: Product, equation: str, lhs: Tensor, rhs: Tensor) -> Tensor:
    """`torch.einsum` of two operands whose matrices are multiplied by `product`."""
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
    y = batched(a, b, product) if axes.batch else product(a, b)
    order = axes.batch + axes.lhs + axes.rhs
    y = y.reshape([sizes[letter] for letter in order])
    return _permuted(y, order, axes.result)


def batched(lhs: Tensor, rhs: Tensor, product: Product) -> Tensor:
    """`product` of each pair of matrices: (B, M, K) and (B, N, K) -> (B, M, N)."""
    if not lhs.shape[0]:
        return lhs.new_zeros(0, lhs.shape[1], rhs.shape[1])
    return torch.stack([product(a, b) for a, b in zip(lhs.unbind(0), rhs.unbind(0), strict=True)])


def _parse(equation: str) -> tuple[_Axes, str, str]:
    terms, arrow, result = equation.replace(" ", "").partition("->")
    left, comma, right = terms.partition(",")
    if not comma or "," in right or "." in equation:
        raise ValueError(f"einsum takes two operands and no ellipsis, got {equation!r}")
    if not arrow:
        result = "".join(sorted(letter for letter in {*left, *right} if (left + right).count(letter) == 1))
    for term in (left, right, result):
        for letter in term:
            if term.count(letter) > 1:
                raise ValueError(f"einsum: axis {letter!r} is repeated in {term!r} ({equation!r})")
    for letter in result:
        if letter not in left + right:
            raise ValueError(f"einsum: axis {letter!r} of the result is in neither operand ({equation!r})")
    shared = [letter for letter in left if letter in right]
    axes = _Axes(
        batch="".join(letter for letter in shared if letter in result),
        lhs="".join(letter for letter in left if letter not in right and letter in result),
        rhs="".join(letter for letter in right if letter not in left and letter in result),
        contracted="".join(letter for letter in shared if letter not in result),
        result=result,
    )
    if not axes.contracted:
        raise ValueError(f"einsum: {equation!r} contracts no axis; a quantized product needs one")
    return axes, left, right


def _sizes(terms: object, equation: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for term, tensor in terms:  # type: ignore[attr-defined]
        if tensor.dim() != len(term):
            raise ValueError(f"einsum: {term!r} of {equation!r} has {len(term)} axes, got shape {tuple(tensor.shape)}")
        for letter, size in zip(term, tensor.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"einsum: axis {letter!r} of {equation!r} is {sizes[letter]} and {size}")
    return sizes


def _sum_lone_axes(x: Tensor, term: str, used: set[str]) -> tuple[Tensor, str]:
    lone = [i for i, letter in enumerate(term) if letter not in used]
    if not lone:
        return x, term
    return x.sum(lone), "".join(letter for letter in term if letter in used)


def _permuted(x: Tensor, order: str, wanted: str) -> Tensor:
    return x if order == wanted else x.permute([order.index(letter) for letter in wanted])
