"""OutputGradients: the squares of the gradients of a loss with respect to the outputs of weights.

A weight (N, K) gives outputs y (M, N). With the gradient g of a loss with respect to y, an error D of the weight
changes the loss by sum_m g_m D x_m. If the losses are those of independent samples of the model's own labels, the mean
square of this is twice the Kullback-Leibler divergence that D causes (the Fisher information). With g and x taken as
independent, and the elements of g as uncorrelated, it is

    sum_n (sum_m g_mn^2) d_n E[x x^T] d_n^T

with d_n the rows of D. `OutputGradients` collects sum_m g_mn^2.

Source of the factorization: K-FAC, arXiv 1503.05671, section 3, with the diagonal of its second factor.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .captures import GROUPED, Key, Use, UseRecorder


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
        squares = SQUARES.get(func, _of_matmul)
        return self._watched(output, lambda grad: self._add(found, squares(self.owner, args, kwargs, found, grad)))

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


def _of_linear(owner: Any, args: Any, kwargs: Any, uses: Sequence[Use], grad: Tensor) -> Iterator[Tensor]:
    yield _over_all_but(grad, -1)


def _of_matmul(owner: Any, args: Any, kwargs: Any, uses: Sequence[Use], grad: Tensor) -> Iterator[Tensor]:
    """Of `matmul` and `addmm`: each use is one matrix of a batch."""
    right = args[-1] if args else kwargs.get("mat2", kwargs.get("other"))
    axis = -1 if owner(right) is not None else -2
    for index in range(len(uses)):
        yield _over_all_but(grad[index] if len(uses) > 1 else grad, axis)


def _of_grouped_mm(owner: Any, args: Any, kwargs: Any, uses: Sequence[Use], grad: Tensor) -> Iterator[Tensor]:
    offsets = kwargs["offs"] if "offs" in kwargs else args[2]
    start = 0
    for stop in offsets.tolist():
        yield _over_all_but(grad[start:stop], -1)
        start = stop


def _of_conv(ndim: int) -> Callable[..., Iterator[Tensor]]:
    return lambda owner, args, kwargs, uses, grad: iter([_over_all_but(grad, -1 - ndim)])


SQUARES: dict[Any, Callable[..., Iterator[Tensor]]] = {
    functional.linear: _of_linear,
    functional.conv1d: _of_conv(1),
    functional.conv2d: _of_conv(2),
    functional.conv3d: _of_conv(3),
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
