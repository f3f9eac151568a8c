"""Quantization-aware training of a weight that lies in parts on several processes (`engine.split`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...kernels.rows import from_rows, to_rows
from ...primitives import QuantSpec
from ..engine.split import Split, check_operand
from .converted_linear import converted_linear
from .qat_spec import QATSpec


@dataclass(frozen=True)
class SplitQATSpec(QATSpec):
    """A `QATSpec` whose scales are those of the whole weight and the whole input.

    Args:
        split: how the weight is cut.
    """

    split: Split | None = None

    def _joined(self, operand: str, x: Tensor, spec: Any) -> tuple[Tensor, Tensor | None] | None:
        assert self.split is not None
        joined = self.split.range_of(operand, x, spec) if isinstance(spec, QuantSpec) else None
        return None if joined is None else joined.qparams(x, False)


def split_fake_quantized_linear(input: Tensor, weight: Tensor, spec: QATSpec, split: Split) -> Tensor:
    """`fake_quantized_linear` of `weight`, a part of a weight in training, without a bias."""
    part = SplitQATSpec(spec.recipe, spec.compute_dtype, split=split)
    x, w = part.quantize_input(to_rows(input)), part.quantize_weight(weight)
    y = converted_linear(x.values, w.values, None, x.codes, w.codes, split)
    return from_rows(y.to(input.dtype), input, None)


def check_split_qat(spec: QATSpec, axis: str, part: int, whole: int) -> None:
    """Raise `ValueError` where a layer cut along `axis` could not have the numbers of one process."""
    if spec.recipe.prunes:
        raise ValueError(f"{spec.recipe} prunes the weight, by the whole of it")
    linear = spec.linear_spec
    for operand, of_one in (("output.lhs", linear.activation), ("output.rhs", linear.weight)):
        if of_one is None or (linear.static and operand == "output.lhs"):
            continue
        if not isinstance(of_one, QuantSpec):
            raise ValueError(f"{operand} has look-up tables ({of_one}), which are not chosen from parts")
        check_operand(of_one, operand, axis, part, whole)
