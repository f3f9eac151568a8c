"""Uses: which weights are multiplied by which inputs, as a model runs.

A function mode sees the products that torch offers, whoever calls them: linear layers, convolutions, bare parameters,
experts one by one or all at once. A weight is recognized by its memory, so a view of it (an expert, the transpose, some
rows) is a use of it too; a copy (a cast, `contiguous()`) is not.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch.nn import functional

from ..dtypes.products import by_position, inlined
from ..kernels.conv import CONVOLUTIONS, input_rows, prepare_conv

Key = tuple[int, "int | None"]
"""(id of a parameter, index of the matrix of a weight (E, N, K), or None)."""


@dataclass(frozen=True, eq=False)
class Use:
    """One product of an input with a weight, or with its matrix `expert`; `rows` gives the inputs as rows (M, K), in
    pieces. It is `transposed` where the sum runs over another axis than such products do: the last but one of a weight
    (N, K), or the last of one that is stored as (K, N). Weights of one `input` share statistics."""

    weight: Tensor
    expert: int | None
    input: Tensor
    rows: Callable[[], Iterable[Tensor]]
    transposed: bool = False

    @property
    def key(self) -> Key:
        """What of which weight is used."""
        return id(self.weight), self.expert

    def unpadded(self, mask: Tensor | None) -> Iterator[Tensor]:
        """The rows, without those of padded tokens where they are those of the mask; an expert has rows of its own."""
        for rows in self.rows():
            yield rows if self.expert is not None else without_padding(rows, mask)


def without_padding(rows: Tensor, mask: Tensor | None) -> Tensor:
    """The rows of tokens that count; all of them if they are not those of the mask."""
    if mask is None or len(rows) != mask.numel():
        return rows
    return rows[mask.reshape(-1).to(rows.device)]


_MOVES = [0]


def memory_has_moved() -> None:
    """Tell the recorders that parameters have other memory than before."""
    _MOVES[0] += 1


class UseRecorder(torch.overrides.TorchFunctionMode):
    """Call `seen` with each `Use` of one of `weights`; a quantized one has no memory of its own, so views of it are not
    recognized. `transposed` has the ids of parameters that are stored as (K, N). ``added(weight, residual)`` is called
    where the output of a product is added to another tensor of its shape, as at the end of a residual branch."""

    def __init__(
        self, weights: Iterable[Tensor], seen: Callable[[Use], None],
        added: Callable[[Tensor, Tensor], None] | None = None, transposed: Container[int] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.weights, self.seen, self.added, self.transposed = list(weights), seen, added, transposed
        self.outputs: torch.utils.weak.WeakIdKeyDictionary = torch.utils.weak.WeakIdKeyDictionary()
        self.count = 0
        self.moves = -1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in INLINED:
            with self:
                return INLINED[func](*args, **kwargs)
        output = None
        for use in self.uses_in(func, args, kwargs):
            self.count += 1
            output = (self.count, use.weight) if use.expert is None and not use.transposed else None
            self.seen(use)
        if self.added is None:
            return func(*args, **kwargs)
        if func in ADDITIONS and len(args) == 2 and not kwargs:
            self._add(*args)
        result = func(*args, **kwargs)
        if func in SAME_VALUES and args and isinstance(args[0], Tensor):
            output = self.outputs.get(args[0])
        if output is not None and isinstance(result, Tensor):
            self.outputs[result] = output
        return result

    def uses_in(self, func: Any, args: Any, kwargs: Any) -> Iterator[Use]:
        """The uses of weights in a call of a torch function."""
        if (product := PRODUCTS.get(func)) is None:
            return
        args, kwargs = by_position(args, kwargs)
        for use in product(self.owner, *args, **kwargs):
            stored_so = id(use.weight) in self.transposed
            yield replace(use, transposed=not use.transposed) if stored_so else use

    def _add(self, a: Any, b: Any) -> None:
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and self.added is not None:
            products = [(self.outputs[x], y) for x, y in ((a, b), (b, a)) if x in self.outputs]
            if products:
                # Of two products, the later one: the other one is quantized before.
                (_, weight), residual = max(products, key=lambda product: product[0][0])
                self.added(weight, residual)

    def owner(self, tensor: Any) -> Tensor | None:
        """The parameter that `tensor` is, or is a view of."""
        if self.moves != _MOVES[0]:
            self.owners = {_key(weight): weight for weight in self.weights}
            self.moves = _MOVES[0]
        return self.owners.get(_key(tensor)) if isinstance(tensor, Tensor) and tensor.numel() else None


def _key(tensor: Tensor) -> tuple[str, int]:
    """What a tensor shares with its views, or is alone in having where it has no memory."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and not functorch.is_functorch_wrapped_tensor(tensor)
    has_memory = is_plain and not tensor.is_meta
    return ("memory", tensor.untyped_storage().data_ptr()) if has_memory else ("object", id(tensor))


Owner = Callable[[Any], "Tensor | None"]


def _unwrapped(tensor: Tensor) -> Tensor:
    """`tensor` without the transforms of torch.func, which it must not outlive; axes that `vmap` hides come first."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        axis, tensor = functorch.maybe_get_bdim(tensor), functorch.get_unwrapped(tensor)
        tensor = tensor.movedim(axis, 0) if axis > 0 else tensor
    return tensor


def _matrix_uses(weight: Tensor, view: Tensor, input: Tensor, batched: bool) -> Iterator[Use]:
    """Uses of `view` (N, K), or (E, N, K) with inputs (E, M, K) where `batched`, of a parameter."""
    transposed = min(weight.shape[-2:]) > 1 and view.stride(-1) != weight.stride(-1)
    size = weight.shape[-2] * weight.shape[-1]
    first = (view.storage_offset() - weight.storage_offset()) // size if weight.dim() == 3 else None
    matrices = enumerate(input) if batched else [(0, input)]
    for index, rows in matrices:
        expert = None if first is None else first + index
        rows = _unwrapped(rows.detach())
        yield Use(weight, expert, input, lambda rows=rows: [rows.reshape(-1, rows.shape[-1])], transposed)  # type: ignore[misc]


def _linear(owner: Owner, input: Tensor, weight: Tensor, bias: Any = None) -> Iterator[Use]:
    parameter = owner(weight)
    if parameter is not None:
        yield from _matrix_uses(parameter, weight, input, False)


def _matmul(owner: Owner, *operands: Tensor, **_: Any) -> Iterator[Use]:
    """Also of `addmm` and `baddbmm`, which add the product to their first operand."""
    a, b = operands[-2:]
    of_a, of_b = owner(a), owner(b)
    if of_b is not None and b.dim() >= 2:
        parameter, view, rows = of_b, b.transpose(-1, -2), a
    elif of_a is not None and a.dim() >= 2 and b.dim() >= 2:
        parameter, view, rows = of_a, a, b.transpose(-1, -2)
    else:
        return
    if view.dim() != 3 or rows.dim() == 3:
        yield from _matrix_uses(parameter, view, rows, view.dim() == 3)


def _grouped_mm(owner: Owner, a: Tensor, b: Tensor, offs: Tensor | None = None, **_: Any) -> Iterator[Use]:
    parameter = owner(b)
    if parameter is None or offs is None or b.dim() != 3 or a.dim() != 2:
        return
    start = 0
    for expert, stop in enumerate(offs.tolist()):
        for use in _matrix_uses(parameter, b[expert].transpose(-1, -2), a[start:stop], False):
            yield Use(parameter, use.expert, a, use.rows, use.transposed)
        start = stop


def _einsum(owner: Owner, equation: Any, *operands: Any) -> Iterator[Use]:
    """Of two operands whose product sums over one of the last two axes of a parameter of two or three axes."""
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    terms, arrow, result = str(equation).replace(" ", "").partition("->")
    names = terms.split(",")
    if len(operands) != 2 or len(names) != 2 or not arrow or "." in terms:
        return
    for weight, input, of_weight, of_input in (
        (operands[1], operands[0], names[1], names[0]),
        (operands[0], operands[1], names[0], names[1]),
    ):
        parameter = owner(weight)
        contracted = [letter for letter in of_weight if letter in of_input and letter not in result]
        batch = "".join(letter for letter in of_weight if letter in of_input and letter in result)
        if parameter is None or len(contracted) != 1 or len(of_weight) not in (2, 3):
            continue
        position = of_weight.index(contracted[0]) - len(of_weight)
        if position == -3 or batch != of_weight[: len(of_weight) - 2]:
            return
        view = weight if position == -1 else weight.transpose(-1, -2)
        rest = [letter for letter in of_input if letter not in batch and letter != contracted[0]]
        rows = input.permute([of_input.index(letter) for letter in [*batch, *rest, *contracted]])
        rows = rows.reshape(*(rows.shape[:1] if batch else ()), -1, rows.shape[-1])
        yield from _matrix_uses(parameter, view, rows, bool(batch))
        return


def _conv(ndim: int) -> Callable[..., Iterator[Use]]:
    def uses(
        owner: Owner, input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Iterator[Use]:  # fmt: skip
        parameter = owner(weight)
        if parameter is None:
            return
        batched = input if input.dim() == ndim + 2 else input.unsqueeze(0)
        prepared = prepare_conv(ndim, batched.detach(), weight.shape, stride, padding, dilation, groups, f"conv{ndim}d")
        yield Use(parameter, None, input, lambda: input_rows(*prepared))

    return uses


GROUPED = [f for f in (getattr(torch, "_grouped_mm", None), getattr(functional, "grouped_mm", None)) if f]
"""The grouped products of this version of torch."""

PRODUCTS: dict[Any, Callable[..., Iterator[Use]]] = {
    functional.linear: _linear,
    **{convolution: _conv(ndim) for ndim, convolution in CONVOLUTIONS.items()},
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm), _matmul),
    Tensor.__matmul__: _matmul,
    torch.einsum: _einsum,
    **dict.fromkeys((torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm), _matmul),
    **dict.fromkeys(GROUPED, _grouped_mm),
}
"""torch function -> (owner, *its arguments) -> the uses of weights in a call of it."""

INLINED = {functional.multi_head_attention_forward: inlined(functional.multi_head_attention_forward)}
"""Functions of torch in Python -> a copy whose products are seen one by one."""

ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
"""torch functions (a, b) -> a + b."""

SAME_VALUES = {functional.dropout, torch.dropout, Tensor.view, Tensor.reshape, Tensor.to, Tensor.contiguous}
"""torch functions of which the result has, in eval mode, the elements of the first argument in the same order."""


# OutputGradients: the squares of the gradients of a loss with respect to the outputs of weights.
#
# A weight (N, K) gives outputs y (M, N). With the gradient g of a loss with respect to y, an error D of the weight
# changes the loss by sum_m g_m D x_m. If the losses are those of independent samples of the model's own labels, the
# mean square of this is twice the Kullback-Leibler divergence that D causes (the Fisher information). With g and x
# taken as independent, and the elements of g as uncorrelated, it is
#
#     sum_n (sum_m g_mn^2) d_n E[x x^T] d_n^T
#
# with d_n the rows of D. `OutputGradients` collects sum_m g_mn^2.
#
# Source of the factorization: K-FAC, arXiv 1503.05671, section 3, with the diagonal of its second factor.


class OutputGradients(UseRecorder):
    """A mode under which a model runs forward; a backward pass then adds to `squares`, the sum of squared gradients of
    each output, (N,) fp32, by weight and expert, and to `tables`, the same for the columns of embedding tables, by id.

    Parameters need not require gradients: an output that has no gradient starts the graph. Without gradients
    (`torch.no_grad`) only `uses`, the products with each weight, and `frequencies`, the look-ups of each row of a
    table, are counted, both by id.
    """

    def __init__(self, weights: Sequence[Tensor], transposed: Container[int] = ()) -> None:
        super().__init__(weights, lambda use: None, transposed=transposed)
        self.squares: dict[Key, Tensor] = {}
        self.tables: dict[int, Tensor] = {}
        self.frequencies: dict[int, Tensor] = {}
        self.uses: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding:
            return self._embedding(func, args, kwargs)
        found = list(self.uses_in(func, args, kwargs))
        output = func(*args, **kwargs)
        if not found:
            return output
        for weight in {id(use.weight): None for use in found}:
            self.uses[weight] = self.uses.get(weight, 0) + 1
        squares, given = SQUARES.get(func, _of_matmul), by_position(args, kwargs)
        return self._watched(output, lambda grad: self._add(found, squares(self.owner, *given, found, grad)))

    def _embedding(self, func: Any, args: Any, kwargs: Any) -> Any:
        ids = args[0] if args else kwargs["input"]
        table = args[1] if len(args) > 1 else kwargs["weight"]
        output, owner = func(*args, **kwargs), self.owner(table)
        if owner is None:
            return output
        counts = torch.bincount(ids.reshape(-1), minlength=table.shape[0]).float()
        key = id(owner)
        self.frequencies[key] = self.frequencies[key] + counts if key in self.frequencies else counts

        def seen(grad: Tensor) -> None:
            _accumulate(self.tables, key, grad.float().square().flatten(0, -2).sum(0))

        return self._watched(output, seen)

    def _watched(self, output: Tensor, seen: Callable[[Tensor], None]) -> Tensor:
        """`output`, which calls `seen` with its gradient in a backward pass."""
        if not torch.is_grad_enabled():
            return output
        if not output.requires_grad:
            # A copy, since a leaf that requires gradients cannot be changed in place.
            output = output.detach().requires_grad_().clone()
        output.register_hook(seen)
        return output

    def _add(self, uses: Sequence[Use], squares: Iterator[Tensor]) -> None:
        for use, square in zip(uses, squares, strict=True):
            if not use.transposed:
                _accumulate(self.squares, use.key, square)


def _accumulate(found: dict[Any, Tensor], key: Any, square: Tensor) -> None:
    found[key] = found[key].add_(square) if key in found else square


def _over_all_but(grad: Tensor, axis: int) -> Tensor:
    """The sum of squares over all axes but one."""
    return grad.float().square().movedim(axis, -1).flatten(0, -2).sum(0) if grad.dim() > 1 else grad.float().square()


def _of_matmul(owner: Any, args: Any, kwargs: Any, uses: Sequence[Use], grad: Tensor) -> Iterator[Tensor]:
    """Of `matmul` and `addmm`: each use is one matrix of a batch."""
    axis = -1 if owner(args[-1]) is not None else -2
    for index in range(len(uses)):
        yield _over_all_but(grad[index] if len(uses) > 1 else grad, axis)


def _of_grouped_mm(owner: Any, args: Any, kwargs: Any, uses: Sequence[Use], grad: Tensor) -> Iterator[Tensor]:
    offsets = kwargs["offs"] if "offs" in kwargs else args[2]
    start = 0
    for stop in offsets.tolist():
        yield _over_all_but(grad[start:stop], -1)
        start = stop


def _of_windows(ndim: int) -> Callable[..., Iterator[Tensor]]:
    return lambda owner, args, kwargs, uses, grad: iter([_over_all_but(grad, -1 - ndim)])


SQUARES: dict[Any, Callable[..., Iterator[Tensor]]] = {
    functional.linear: _of_windows(0),
    **{convolution: _of_windows(ndim) for ndim, convolution in CONVOLUTIONS.items()},
    **dict.fromkeys(GROUPED, _of_grouped_mm),
}
"""torch function -> (owner, args, kwargs, uses, gradient of the output) -> the sums of squares of each use, (N,);
`matmul` and its like are the rest of `PRODUCTS`."""


@contextmanager
def without_parameter_gradients(model: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient; afterwards each does as before."""
    required = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in required:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in required:
            parameter.requires_grad_(True)
