"""FakeQuantizedWeight: a parameter in floating point that computes as the quantized weight it will become.

`qat` makes it: a `MasterWeight` whose products have the value of the converted weight (`fake_quantize`). Its codes are
those of the parameter as it is stored. A view of it (an expert, a transpose, some rows) knows its place in it.
A product with a view whose codes would differ from those of the parameter raises an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.conv import Window, to_matrix
from ...primitives import QuantSpec
from ..engine.gemm_spec import TrainingSpec
from ..engine.operand import STATELESS, ContractionState
from ..engine.split import Split, check_operand
from ..weights.base import floats_of
from ..weights.master import MasterWeight
from .fake_quantize import fake_quantized_conv, fake_quantized_linear
from .qat_spec import QATSpec


@dataclass(frozen=True)
class SplitQATSpec(QATSpec):
    """A `QATSpec` whose scales are those of the whole weight and the whole input, of which this process has parts."""

    split: Split | None = None

    def _joined(self, operand: str, x: Tensor, spec: Any) -> tuple[Tensor, Tensor | None] | None:
        assert self.split is not None
        joined = self.split.range_of(operand, x, spec) if isinstance(spec, QuantSpec) else None
        return None if joined is None else joined.qparams(x, False)


aten = torch.ops.aten


class FakeQuantizedWeight(MasterWeight):
    """See the top of the file."""

    training_type = QATSpec

    @property
    def qat_spec(self) -> QATSpec:
        """How it is fake-quantized."""
        return self.scheme.training  # type: ignore[attr-defined]

    @property
    def training_spec(self) -> TrainingSpec:
        raise NotImplementedError(
            "a weight in quantization-aware training takes F.linear, matmul, bmm, grouped_mm, einsum along its last "
            "two axes, and F.embedding; this is another product, or a product with sums of the weight"
        )

    def linear(self, input: Tensor, bias: Tensor | None, state: ContractionState = STATELESS) -> Tensor:
        if self.qat_spec.partial:
            raise ValueError(
                f"a product with a part of a weight that converts to {self.qat_spec.linear_spec.weight}: its codes "
                "depend on the rest of the weight; multiply the whole of it"
            )
        spec = self.qat_spec
        if isinstance(state, Split):
            spec = SplitQATSpec(spec.recipe, spec.compute_dtype, split=state)
        return fake_quantized_linear(input, self, bias, spec, state)

    def check_split(self, axis: str, part: int, whole: int) -> None:
        recipe, linear = self.qat_spec.recipe, self.qat_spec.linear_spec
        if recipe.prunes:
            raise ValueError(f"{recipe} prunes the weight, by the whole of it")
        for operand, spec in (("output.lhs", linear.activation), ("output.rhs", linear.weight)):
            if spec is None or (linear.static and operand == "output.lhs"):
                continue
            if not isinstance(spec, QuantSpec):
                raise ValueError(f"{operand} has look-up tables ({spec}), which are not chosen from parts")
            check_operand(spec, operand, axis, part, whole)

    def conv(self, input: Tensor, window: Window) -> Tensor:
        return fake_quantized_conv(input, to_matrix(floats_of(self)), None, self.qat_spec, window)

    def embedding(self, ids: Tensor, **options: Any) -> Tensor:
        spec = self.qat_spec
        if spec.transposed or spec.partial:
            raise ValueError("embedding takes the whole weight, this is a view of it")
        if not spec.rows_are_independent:
            return functional.embedding(ids, spec.weight_values(self), **options).to(self.dtype)
        # Rows are gathered first: fewer to quantize.
        rows = functional.embedding(ids.reshape(-1), floats_of(self), **options)
        return spec.weight_values(rows).to(self.dtype).reshape(*ids.shape, self.shape[-1])

    def check_convert(self) -> None:
        self.qat_spec.recipe.check(self.master)

    def convert(self) -> Tensor:
        return self.qat_spec.recipe.apply(self.master.detach())

    def _training_of_view(self, func: Any, args: Any) -> QATSpec:
        return _of_view(self.qat_spec, func, args, self.master)

    def _training_of_whole(self) -> QATSpec:
        return self.qat_spec.of_whole()


COPIES = {
    getattr(aten, name).default
    for name in ("alias", "clone", "detach", "empty_like", "new_empty", "new_zeros", "_pin_memory", "_to_copy")
}
"""Operators whose result has the axes of their argument."""

CUTS = {
    aten.chunk.default: 2,
    aten.select.int: 1,
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.unbind.int: 1,
}
"""Operators that take parts along one axis, and the position of the axis in their arguments; 0 if it is not given."""


def _of_view(spec: QATSpec, func: Any, args: Any, weight: Tensor) -> QATSpec:
    """The spec of the result of `func` on a weight or view of this spec; partial where that cannot be told."""
    if func in COPIES:
        return spec
    ndim, part = weight.dim(), replace(spec, partial=True)
    if func in CUTS:
        axis = (args[CUTS[func]] if len(args) > CUTS[func] else 0) % ndim
        row = ndim - 1 if spec.transposed else ndim - 2
        drops_axis = func in (aten.select.int, aten.unbind.int)
        whole = spec.rows_are_independent and (axis < ndim - 2 or (axis == row and not drops_axis))
        return spec if whole else part
    order = _order(func, args, ndim)
    if order is None:
        sizes = tuple(args[1]) if func in (aten.view.default, aten.as_strided.default) else ()
        return spec if sizes == tuple(weight.shape) else part
    if order[-2:] == [ndim - 2, ndim - 1]:
        return spec
    return replace(spec, transposed=not spec.transposed) if order[-2:] == [ndim - 1, ndim - 2] else part


def _order(func: Any, args: Any, ndim: int) -> list[int] | None:
    """The order in which an operator permutes the axes; None if `func` is another operator."""
    order = list(range(ndim))
    if func is aten.permute.default:
        return [axis % ndim for axis in args[1]]
    if func is aten.t.default:
        return order[::-1]
    if func is aten.transpose.int:
        a, b = (axis % ndim for axis in args[1:3])
        order[a], order[b] = order[b], order[a]
        return order
    return None
