"""Matrix products with a quantized operand: `matmul`, `mm`, `bmm`, `addmm` and `grouped_mm`.

Every product becomes `linear(input, weight)`, which contracts the last axis of both. A weight that is to be contracted
along another axis is transposed first, which moves no data.
"""

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels.ops.experts import experts_of_groups
from ..primitives import tracing
from .base import QuantizedTensor
from .dispatch import implements_aten, implements_function
from .experts import grouped_linear, has_kernel
from .linear import kinds, linear
from .transposed_weight import contracted

aten = torch.ops.aten


@implements_function(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch.matmul` with one quantized operand: 2-d against a tensor of any rank, or 3-d against at least 2-d."""
    if out is not None:
        return _into(out, matmul(input, other))
    if isinstance(input, QuantizedTensor):
        if isinstance(other, QuantizedTensor):
            raise TypeError("matmul of two quantized tensors: dequantize() one of them")
        return linear(other, input) if other.dim() == 1 else matmul(other.mT, input.mT).mT
    if not isinstance(other, QuantizedTensor):
        raise TypeError(f"matmul takes a quantized operand, got {kinds(input, other)}")
    if len(other.scheme.shape) == 2:
        return linear(input, contracted(other))
    if input.dim() < 2 or (input.dim() == 3 and input.shape[0] != 1):
        return bmm(input, other)
    batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:1])
    rows = input.expand(*batch, *input.shape[-2:]).movedim(-3, 0)
    return bmm(rows.flatten(1, -2), other).unflatten(1, rows.shape[1:-1]).movedim(0, -3)


@implements_function(torch.Tensor.__rmatmul__)
def _rmatmul(other: Tensor, input: Tensor) -> Tensor:
    return matmul(input, other)


@implements_function(torch.mm, torch.Tensor.mm)
def mm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch.mm` with one quantized operand."""
    if input.dim() != 2 or mat2.dim() != 2:
        raise ValueError(f"mm takes matrices, got shapes {tuple(input.shape)} and {tuple(mat2.shape)}")
    return _into(out, matmul(input, mat2))


@implements_function(torch.bmm, torch.Tensor.bmm)
def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """`torch.bmm` with quantized matrices (E, K, N), such as experts in one parameter: (E, M, K) -> (E, M, N)."""
    if isinstance(input, QuantizedTensor):
        return bmm(mat2.mT, input.mT).mT
    if not isinstance(mat2, QuantizedTensor):
        raise TypeError(f"bmm takes a quantized operand, got {kinds(input, mat2)}")
    shape = mat2.scheme.shape
    if input.dim() != 3 or len(shape) != 3 or input.shape[0] != shape[0]:
        raise ValueError(f"bmm: an input of shape {tuple(input.shape)} does not fit matrices of shape {shape}")
    weights = mat2.transpose(1, 2)
    if not has_kernel(weights, input):
        return torch.stack([linear(input[e], weights[e]) for e in range(shape[0])])
    experts = torch.arange(shape[0], device=input.device).repeat_interleave(input.shape[1]).unsqueeze(1)
    return grouped_linear(input.reshape(-1, input.shape[2]), weights, experts).unflatten(0, input.shape[:2])


@implements_function(torch._grouped_mm)
def grouped_mm(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`F.grouped_mm` of rows (S, K), sorted by expert, and quantized matrices (E, K, N). Rows offs[e - 1] to offs[e]
    are multiplied by matrix e; the result is zero after the last offset."""
    shape = mat_b.shape
    if not isinstance(mat_b, QuantizedTensor) or mat_a.dim() != 2 or offs is None or bias is not None:
        raise ValueError(
            f"grouped_mm takes rows (S, K), quantized matrices (E, K, N), offs and no bias; got shapes "
            f"{tuple(mat_a.shape)} and {tuple(shape)}"
        )
    y = grouped_linear(mat_a, mat_b.transpose(1, 2), experts_of_groups(offs, mat_a.shape[0]))
    return y if out_dtype is None else y.to(out_dtype)


@implements_function(torch.addmm, torch.Tensor.addmm)
def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    """beta * input + alpha * (mat1 @ mat2), mat2 quantized."""
    if isinstance(mat2, QuantizedTensor) and beta == 1 and alpha == 1 and input.dim() == 1:
        return _into(out, linear(mat1, contracted(mat2), input))
    return _added(input, alpha * mm(mat1, mat2), beta, out)


@implements_function(torch.baddbmm, torch.Tensor.baddbmm)
def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    """beta * input + alpha * bmm(batch1, batch2), one of the two quantized."""
    return _added(input, alpha * bmm(batch1, batch2), beta, out)


def _added(input: Tensor, product: Tensor, beta: float, out: Tensor | None) -> Tensor:
    """beta * input + product; with beta = 0, torch ignores NaN in `input`."""
    return _into(out, product if beta == 0 else beta * input + product)


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    """`result`, written into `out` where the caller gives one, as the functions of torch do."""
    if out is None:
        return result
    if isinstance(out, QuantizedTensor):
        raise TypeError("out= takes a plain tensor, got a quantized one")
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


_LEFT = "input self mat_a mat1 batch1 mat vec1"
OPERANDS = f"{_LEFT} other mat_b mat2 batch2 vec vec2 tensor".split()
"""Names that functions of torch have for what they multiply, those of the left operand first."""


def by_position(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of a torch function, operands by position: their names depend on the function."""
    kwargs = {{"axis": "dim", "keepdims": "keepdim"}.get(name, name): value for name, value in kwargs.items()}
    return (*args, *(kwargs.pop(name) for name in OPERANDS if name in kwargs)), kwargs


def inlined(function: Any) -> FunctionType:
    """A copy of a Python function of torch that runs its body, and so dispatches the functions that it calls, instead
    of being dispatched to `__torch_function__` itself."""
    off = lambda _: False  # noqa: E731
    names = {**function.__globals__, "has_torch_function": off, "has_torch_function_unary": off}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Its products are then calls of our `F.linear`, which has its own gradient and takes inputs of any strides.
implements_function(functional.multi_head_attention_forward)(inlined(functional.multi_head_attention_forward))


@implements_aten(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
def _products_below_autograd(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Handle products that reach aten without a call of a torch function of this file (inside torch.tensordot)."""
    quantizes_input = any(isinstance(arg, QuantizedTensor) and arg.scheme.activation is not None for arg in args)
    if tracing.in_backward() and quantizes_input:
        if torch.is_grad_enabled():
            # A second derivative, or a forward that checkpointing runs again: torch does not say which.
            raise NotImplementedError(
                f"{func} with a weight that quantizes its input is not implemented here (inside torch.tensordot or a "
                "DTensor) under checkpointing or with create_graph=True: write the product as F.linear of plain tensors"
            )
        # torch's formula multiplies the gradient by the weight: straight through the quantization of the input.
        args = [arg.with_activation(None) if isinstance(arg, QuantizedTensor) else arg for arg in args]
    by_packet: Any = {aten.mm: mm, aten.bmm: bmm, aten.addmm: addmm, aten.baddbmm: baddbmm}
    made: Tensor = by_packet[func.overloadpacket](*args, **kwargs)
    return made


# `torch.einsum` of two operands, computed by matrix products.
# A frozen weight that quantizes its input needs this: the gradient of torch's own products would multiply by the same
# weight, and so quantize the gradient like an input.


@implements_function(torch.einsum)
def einsum(equation: str, *operands: Any) -> Tensor:
    """`torch.einsum` with quantized operands; it calls `linear` if one of two operands quantizes its input."""
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

    def size(letters: str) -> int:
        return math.prod([sizes[letter] for letter in letters])

    batch = (size(axes.batch),) if axes.batch else ()
    inner = size(axes.contracted)
    a = _permuted(lhs, left, axes.batch + axes.lhs + axes.contracted).reshape(*batch, size(axes.lhs), inner)
    b = _permuted(rhs, right, axes.batch + axes.rhs + axes.contracted).reshape(*batch, size(axes.rhs), inner)
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
