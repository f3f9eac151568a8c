"""FakeQuantizedWeight: a parameter in floating point that computes as the quantized weight it will become.

`qat` makes it: a `MasterWeight` whose products have the value of the converted weight (`fake_quantize`). Its codes are
those of the parameter as it is stored. A view of it (an expert, a transpose, some rows) knows its place in it.
A product with a view whose codes would differ from those of the parameter raises an error.

`QATSpec` is how it quantizes: without state, by scales that are chosen from the values of each call, as in inference; a
static scale is given by the recipe.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.conv import Window, to_matrix
from ...kernels.ops.block_mm import pad_to_blocks
from ...kernels.ops.quantize import quantize_rows, quantize_static, without_lost_rows
from ...primitives import LinearSpec, PerAxis, QuantSpec, jsonable
from ...recipes.base import WeightRecipe
from ..engine.gemm_spec import TrainingSpec
from ..engine.operand import STATELESS, ContractionState
from ..engine.split import Split, check_operand
from ..weights.base import TrainingWeight, floats_of
from ..weights.master import MasterWeight
from . import fake_quantize
from .converted import sums_integers
from .fake_quantize import FakeQuantized, Scaled

aten = torch.ops.aten


@jsonable
class QATSpec:
    """How a weight is fake-quantized in training, and what it converts to; a `Quantization` of its layer.

    Args:
        recipe: for inference; see `qat`.
        compute_dtype: see `qat`.
        transposed: this describes a view of a weight whose last two axes are exchanged.
        partial: this describes a view that lacks a part of the weight on which its codes depend.
    """

    recipe: WeightRecipe
    compute_dtype: torch.dtype | None = None
    transposed: bool = False
    partial: bool = False

    def __post_init__(self) -> None:
        # Made once: it is read on each call, and by compilers that trace it.
        object.__setattr__(self, "_linear_spec", self.recipe.linear_spec())
        if getattr(self.linear_spec.weight, "rotation", 0):
            raise ValueError(f"qat: {self.recipe} rotates blocks, which is not trained; leave rotated=True out")

    @property
    def linear_spec(self) -> LinearSpec:
        return self._linear_spec  # type: ignore[attr-defined]

    @property
    def sums_integers(self) -> bool:
        """Whether layers add up products of codes, and not of what they stand for."""
        return self.compute_dtype is None and sums_integers(self.linear_spec)

    @property
    def product_dtype(self) -> torch.dtype | None:
        """fp32 for fake-quantized activations, as in the kernels that dequantize them."""
        widens = self.compute_dtype is None and self.linear_spec.activation is not None
        return torch.float32 if widens and not self.sums_integers else None

    @property
    def precedes_windows(self) -> bool:
        spec = self.linear_spec
        return spec.activation is None or (not spec.static and spec.activation.granularity == PerAxis(0))

    @property
    def rows_are_independent(self) -> bool:
        """Whether the codes of a row depend on that row alone."""
        weight = self.linear_spec.weight
        return weight.granularity.pattern(2)[0] == 1 and weight.scale_spec is None

    def of_whole(self) -> "QATSpec":
        """The spec of the weight that this one is a view of."""
        return replace(self, transposed=False, partial=False)

    def quantize_weight(self, matrix: Tensor) -> FakeQuantized:
        return self._quantize_weight(matrix, self.product_dtype, self.sums_integers)

    def weight_values(self, weight: Tensor) -> Tensor:
        """`weight`, plain or in training, fake-quantized; differentiable."""
        return self._quantize_weight(weight, None, multiplied=False).values

    def _quantize_weight(self, weight: Tensor, dtype: torch.dtype | None, multiplied: bool) -> FakeQuantized:
        if self.transposed:
            whole = self.of_whole()._quantize_weight(weight.transpose(-2, -1), dtype, multiplied)
            w = None if whole.codes is None else whole.codes.transposed(weight.shape[-2])
            return FakeQuantized(whole.values.transpose(-2, -1), w)
        if self.recipe.prunes:
            weight = self.recipe.prune(floats_of(weight))
        spec = self.linear_spec.weight
        with torch.no_grad():
            values = weight.floats() if isinstance(weight, TrainingWeight) else weight
            scale, other = self._joined("output.rhs", values, spec) or spec.choose_qparams(values)
            codes = None if self.compute_dtype else spec.quantize(values, scale, other)
            scaled = Scaled(spec, scale, other, codes)
        return self._fake_quantize(weight, values, scaled, fake_quantize.clips(spec), dtype, multiplied)

    def quantize_input(self, rows: Tensor) -> FakeQuantized:
        spec = self.linear_spec.activation
        if spec is None:
            return FakeQuantized(rows)
        count, length = rows.shape
        padded = pad_to_blocks(rows, spec.granularity)
        with torch.no_grad():
            # `detach` also leaves out tangents, for which torch 2.11 has no `aminmax`: the refusal comes below.
            scaled = self._scale_input(padded.detach(), spec)
        leaves_some = self.linear_spec.static or fake_quantize.clips(spec)
        x_hat, codes, _ = self._fake_quantize(
            padded, padded, scaled, leaves_some, self.product_dtype, self.sums_integers
        )
        return FakeQuantized(x_hat[:count, :length], None if codes is None else codes._replace(kept=count), scaled)

    def _scale_input(self, rows: Tensor, spec: QuantSpec) -> Scaled:
        given = self.recipe.act_scale(rows.device)
        if given is None and (joined := self._joined("output.lhs", rows, spec)) is not None:
            if self.compute_dtype is not None:
                return Scaled(spec, *joined)
            codes, scale, zero_point = quantize_static(rows, spec, *joined)
            return Scaled(spec, scale, zero_point, codes)
        if self.compute_dtype is not None:
            scale, zero_point = spec.choose_qparams(without_lost_rows(rows, spec)) if given is None else (given, None)
            return Scaled(spec, scale, zero_point)
        quantized = quantize_rows(rows, spec) if given is None else quantize_static(rows, spec, given, None)
        codes, scale, zero_point = quantized
        return Scaled(spec, scale, zero_point, codes)

    def _joined(self, operand: str, x: Tensor, spec: Any) -> tuple[Tensor, Tensor | None] | None:
        """Scale and zero point of an operand that `x` is only a part of; see `split`."""
        return None

    def _fake_quantize(
        self, input: Tensor, values: Tensor, scaled: Scaled, leaves_some: bool, dtype: torch.dtype | None,
        multiplied: bool,
    ) -> FakeQuantized:  # fmt: skip
        """Args: leaves_some: elements outside the range of the codes get no gradient."""

        def x_hat() -> Tensor:
            mask = (lambda unclipped: unclipped) if leaves_some else None
            compute = self.compute_dtype or torch.float32
            return fake_quantize.straight_through_rounding(input, values, scaled, mask, dtype, compute)

        return fake_quantize.fake_quantize(values, scaled, x_hat, multiplied)

    def __str__(self) -> str:
        views = [name for name in ("transposed", "partial") if getattr(self, name)]
        return " ".join([f"qat({self.recipe})", *views])


@dataclass(frozen=True)
class SplitQATSpec(QATSpec):
    """A `QATSpec` whose scales are those of the whole weight and the whole input, of which this process has parts."""

    split: Split | None = None

    def _joined(self, operand: str, x: Tensor, spec: Any) -> tuple[Tensor, Tensor | None] | None:
        assert self.split is not None
        joined = self.split.range_of(operand, x, spec) if isinstance(spec, QuantSpec) else None
        return None if joined is None else joined.qparams(x, False)


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
        if self.qat_spec.partial and not isinstance(state, Split):
            raise ValueError(
                f"a product with a part of a weight that converts to {self.qat_spec.linear_spec.weight}: its codes "
                "depend on the rest of the weight; multiply the whole of it"
            )
        spec = self.qat_spec
        if isinstance(state, Split):
            spec = SplitQATSpec(spec.recipe, spec.compute_dtype, split=state)
        return fake_quantize.fake_quantized_linear(input, self, bias, spec, state)

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
        return fake_quantize.fake_quantized_conv(input, to_matrix(floats_of(self)), None, self.qat_spec, window)

    def embedding(self, ids: Tensor, **options: Any) -> Tensor:
        spec = self.qat_spec
        if spec.transposed or spec.partial:
            raise ValueError("embedding takes the whole weight, this is a view of it")
        if not spec.rows_are_independent:
            return torch.nn.functional.embedding(ids, spec.weight_values(self), **options).to(self.dtype)
        # Rows are gathered first: fewer to quantize.
        rows = torch.nn.functional.embedding(ids.reshape(-1), floats_of(self), **options)
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
    aten.chunk.default: 2, aten.select.int: 1, aten.slice.Tensor: 1, aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2, aten.unbind.int: 1,
}  # fmt: skip
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
        strided = func is aten.as_strided.default
        shape = tuple(args[1] if strided else func(weight, *args[1:]).shape)
        kept = 2 if spec.transposed else 1  # axes that a row lies in
        keeps_rows = spec.rows_are_independent and not strided and shape[-kept:] == weight.shape[-kept:]
        return spec if keeps_rows or shape == tuple(weight.shape) else part
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
