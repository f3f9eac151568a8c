"""The functions of torch that contract, each written as products of two matrices.

A function here has the arguments of torch's, after `call`, which gives the products. It returns None where the call is
none that it knows: an integer operand, or a weight that is quantized or in training already; torch's own function runs
then. The sums of `addmm` and its kin, biases and softmax stay in floating point.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...dtypes import QuantizedTensor
from ...dtypes.products import Product, batched, einsum_by, inlined
from ...kernels.registry import from_rows, to_rows
from ..engine.functional import attention_by, batches_by, conv_by, conv_transpose_by, grouped_mm_by


class Declined(Exception):
    """The only product of a call is in full precision."""


class Call:
    """The products of one call of a function, as the rules of `injection` say."""

    def __init__(self, injection: Any) -> None:
        self.injection = injection

    def product(self, function: str) -> Product:
        """c[m, n] = sum_k a[m, k] b[n, k] of the next `function` at this call site."""
        site, spec = self.injection.rule_at(function)
        if spec is None:
            if function not in ("scores", "values"):
                raise Declined
            return in_full_precision
        return lambda a, b: self.injection.multiply(site, spec, a, b)


def in_full_precision(lhs: Tensor, rhs: Tensor) -> Tensor:
    """c[a, b] = sum_c lhs[a, c] rhs[b, c]."""
    return torch.mm(lhs, rhs.t())


Function = Callable[..., "Tensor | None"]


def multiplies(*operands: Any) -> bool:
    """Whether these are operands of a product that can be quantized here."""
    tensors = all(isinstance(each, Tensor) and each.is_floating_point() for each in operands)
    return tensors and not any(isinstance(each, QuantizedTensor) for each in operands)


def _linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if not multiplies(input, weight) or weight.dim() != 2 or not input.dim():
        return None
    return from_rows(call.product("linear")(to_rows(input), weight), input, bias)


def _matmul(call: Call, input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor | None:
    return None if out is not None else matmul_by(call, "matmul", input, other)


def matmul_by(call: Call, function: str, lhs: Tensor, rhs: Tensor) -> Tensor | None:
    """`torch.matmul`; None if the operands cannot be quantized or do not fit."""
    if not multiplies(lhs, rhs) or not lhs.dim() or not rhs.dim():
        return None
    if lhs.shape[-1] != rhs.shape[-2 if rhs.dim() > 1 else 0]:
        return None
    product = call.product(function)
    a = lhs if lhs.dim() > 1 else lhs.unsqueeze(0)
    b = rhs.mT if rhs.dim() > 1 else rhs.unsqueeze(0)
    if b.dim() == 2:
        y = product(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[0])
    elif a.dim() == 2:  # one matrix on the left: its operand is the same for all others
        y = product(a, b.reshape(-1, b.shape[-1])).reshape(a.shape[0], *b.shape[:-1]).movedim(0, -2)
    else:
        y = batches_by(product, a, b)
    y = y if rhs.dim() > 1 else y.squeeze(-1)
    return y if lhs.dim() > 1 else y.squeeze(-2 if rhs.dim() > 1 else -1)


def _named(function: str, dims: tuple[int, int]) -> Function:
    """`mm`, `bmm`, `mv`, `dot`: matmul of operands with these numbers of axes."""

    def run(call: Call, input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor | None:
        fits = isinstance(input, Tensor) and isinstance(other, Tensor) and (input.dim(), other.dim()) == dims
        return matmul_by(call, function, input, other) if fits and out is None else None

    return run


def _rmatmul(call: Call, input: Tensor, other: Tensor) -> Tensor | None:
    return matmul_by(call, "matmul", other, input)


def _added(function: str, summed: bool = False) -> Function:
    """`addmm`, `addmv`, `baddbmm`; with `summed`, `addbmm`, which adds up the batch."""

    def run(
        call: Call, input: Tensor, lhs: Tensor, rhs: Tensor, *, beta: float = 1, alpha: float = 1,
        out: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        y = None if out is not None else matmul_by(call, function, lhs, rhs)
        if y is None:
            return None
        y = (y.sum(0) if summed else y) * alpha
        return y if beta == 0 else beta * input + y

    return run


def _inner(call: Call, input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor | None:
    if out is not None or not multiplies(input, other) or not input.dim() or not other.dim():
        return None
    y = call.product("inner")(input.reshape(-1, input.shape[-1]), other.reshape(-1, other.shape[-1]))
    return y.reshape(*input.shape[:-1], *other.shape[:-1])


def _tensordot(call: Call, a: Tensor, b: Tensor, dims: Any = 2, out: Tensor | None = None) -> Tensor | None:
    if out is not None or not multiplies(a, b) or isinstance(dims, Tensor):
        return None
    if isinstance(dims, int):
        dims = [range(a.dim() - dims, a.dim()), range(dims)]
    of_a, of_b = ([d % t.dim() for d in each] for each, t in zip(dims, (a, b), strict=True))
    if not of_a:
        return None
    kept_a, kept_b = ([d for d in range(t.dim()) if d not in each] for each, t in ((of_a, a), (of_b, b)))
    length = math.prod(a.shape[d] for d in of_a)
    x, w = a.permute(*kept_a, *of_a).reshape(-1, length), b.permute(*kept_b, *of_b).reshape(-1, length)
    return call.product("tensordot")(x, w).reshape([a.shape[d] for d in kept_a] + [b.shape[d] for d in kept_b])


def _bilinear(call: Call, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """sum_ij x1[..., i] w[o, i, j] x2[..., j]: a product with x1, and one with x2 for each row."""
    if not multiplies(input1, input2, weight):
        return None
    x, z = to_rows(input1), to_rows(input2)
    of_first = call.product("bilinear")(x, weight.permute(0, 2, 1).reshape(-1, weight.shape[1]))
    y = batched(z.unsqueeze(1), of_first.reshape(-1, weight.shape[0], weight.shape[2]), call.product("bilinear"))
    return from_rows(y.squeeze(1), input1, bias)


def _einsum(call: Call, equation: str, *operands: Any) -> Tensor | None:
    """Of more than two operands, the first two are multiplied, then the result and the next one."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) < 2 or not multiplies(*operands):
        return None
    terms, result, tensors = _explicit(equation, list(operands))
    while len(tensors) > 1:
        (first, second, *others), (a, b, *rest) = terms, tensors
        wanted = set("".join([*others, result]))
        kept = result if not others else "".join(dict.fromkeys(c for c in first + second if c in wanted))
        step = f"{first},{second}->{kept}"
        if set(first) & set(second) - set(kept):
            y = einsum_by(call.product("einsum"), step, a, b)
        else:  # nothing is summed over both: no contraction
            y = torch.einsum(step, a, b)
        terms, tensors = [kept, *others], [y, *rest]
    return tensors[0]


def _explicit(equation: str, operands: list[Tensor]) -> tuple[list[str], str, list[Tensor]]:
    """Terms and result without ellipsis and with an arrow, and operands without repeated letters."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    spare = [c for c in map(chr, range(ord("A"), ord("z") + 1)) if c.isalpha() and c not in equation]
    pairs = list(zip(terms, operands, strict=True))
    count = max(t.dim() - len(term.replace("...", "")) if "..." in term else 0 for term, t in pairs)
    axes = "".join(spare[:count])
    for i, (term, tensor) in enumerate(zip(terms, operands, strict=True)):
        own = tensor.dim() - len(term.replace("...", ""))
        terms[i] = term.replace("...", axes[count - own :])
    if not arrow:
        letters = "".join(terms)
        result = axes + "".join(sorted(c for c in set(letters) if letters.count(c) == 1 and c not in axes))
    result = result.replace("...", axes)
    for i, term in enumerate(terms):
        once = "".join(dict.fromkeys(term))
        # Axes of one element broadcast against those of the other operands.
        if once != term:
            operands[i], terms[i] = torch.einsum(f"{term}->{once}", operands[i]), once
    sizes = {c: max(t.shape[term.index(c)] for term, t in zip(terms, operands, strict=True) if c in term) for c in axes}
    for i, (term, tensor) in enumerate(zip(terms, operands, strict=True)):
        operands[i] = tensor.expand([sizes.get(c, n) for c, n in zip(term, tensor.shape, strict=True)])
    return terms, result, operands


def _conv(by: Callable[..., Tensor], name: str) -> Function:
    """Convolutions, which `by` computes, of a name that ends with their number of axes."""

    def run(call: Call, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        if not multiplies(input, weight):
            return None
        return by(call.product(name), int(name[-2]), input, weight, *args, **kwargs)

    return run


def _attention(call: Call, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    if not multiplies(query, key, value):
        return None
    scores, values = call.product("scores"), call.product("values")
    if in_full_precision is scores is values:
        return None
    return attention_by(scores, values, query, key, value, *args, **kwargs)


def _grouped_mm(call: Call, mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    if not multiplies(mat_a, mat_b):
        return None
    return grouped_mm_by(call.product("grouped_mm"), mat_a, mat_b, *args, **kwargs)


def _multi_dot(call: Call, tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor | None:
    """From left to right."""
    if out is not None or not multiplies(*tensors):
        return None
    y = tensors[0]
    for tensor in tensors[1:]:
        product = matmul_by(call, "multi_dot", y, tensor)
        assert product is not None
        y = product
    return y


TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")

FUNCTIONS: dict[Any, Function] = {
    functional.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul), _matmul),
    Tensor.__rmatmul__: _rmatmul,
    **dict.fromkeys((torch.mm, Tensor.mm), _named("mm", (2, 2))),
    **dict.fromkeys((torch.bmm, Tensor.bmm), _named("bmm", (3, 3))),
    **dict.fromkeys((torch.mv, Tensor.mv), _named("mv", (2, 1))),
    **dict.fromkeys((torch.dot, Tensor.dot), _named("dot", (1, 1))),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _added("addmm")),
    **dict.fromkeys((torch.addmv, Tensor.addmv), _added("addmv")),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), _added("baddbmm")),
    **dict.fromkeys((torch.addbmm, Tensor.addbmm), _added("addbmm", summed=True)),
    **dict.fromkeys((torch.inner, Tensor.inner), _inner),
    torch.tensordot: _tensordot,
    torch.einsum: _einsum,
    torch.linalg.multi_dot: _multi_dot,
    functional.bilinear: _bilinear,
    **{getattr(functional, name): _conv(conv_by, name) for name in ("conv1d", "conv2d", "conv3d")},
    **{getattr(functional, name): _conv(conv_transpose_by, name) for name in TRANSPOSED},
    functional.scaled_dot_product_attention: _attention,
    torch._grouped_mm: _grouped_mm,
    **({functional.grouped_mm: _grouped_mm} if hasattr(functional, "grouped_mm") else {}),
}
"""torch function -> the same by products of two matrices."""


INLINED: dict[Any, Callable[..., Any]] = {
    functional.multi_head_attention_forward: inlined(functional.multi_head_attention_forward),
    Tensor.backward: inlined(Tensor.backward),
    torch.autograd.backward: inlined(torch.autograd.backward),
    torch.autograd.grad: inlined(torch.autograd.grad),
}
"""Functions of torch in Python -> a copy whose contractions are seen one by one; a backward may run parts of a forward
again."""
