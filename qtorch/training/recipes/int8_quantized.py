"""Quantized training: weights live in int8 or int4, and every update of them rounds stochastically."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ...dtypes import PackedLayout
from ...model import targets, weight_kinds
from ...primitives import LinearSpec, PerGroup, PerRow, QuantSpec, Rounding, qdtype
from ...recipes.base import Recipe, check_has_values, register_recipe
from ..weights.codes import CodesWeight
from .base import check_trainable, declines_experts


class _QuantizedTraining(Recipe):
    trains: ClassVar[bool] = True

    stochastic_rounding: bool

    def rounding(self) -> Rounding:
        """Of updates."""
        return Rounding.STOCHASTIC if self.stochastic_rounding else Rounding.NEAREST_EVEN

    def linear_spec(self) -> LinearSpec:
        raise NotImplementedError

    def declines(self, kind: weight_kinds.WeightKind) -> str | None:
        # Updates of codes go along their rows in memory.
        if kind.is_transposed:
            return f"stored as (inputs, outputs), which {self.name} does not train"
        return declines_experts(self, kind)

    def check_target(self, target: targets.Target[Any]) -> None:
        if target.kind.is_transposed:
            raise ValueError(f"is {self.declines(target.kind)}")
        super().check_target(target)

    def check(self, weight: Tensor) -> None:
        check_trainable(weight)
        check_has_values(weight, self)
        self.linear_spec().weight.block_size(weight.shape)

    def apply(self, weight: Tensor) -> Tensor:
        return CodesWeight.from_float(weight, self.linear_spec())

    def has_made(self, target: targets.Target[Any]) -> bool:
        weight = target.parameter
        return isinstance(weight, CodesWeight) and weight.scheme.weight == self.linear_spec().weight


@register_recipe("int8_weight_only_quantized_training")
@dataclass(frozen=True)
class Int8WeightOnlyQuantizedTraining(_QuantizedTraining):
    """Weights in int8 with a scale per output channel, without a floating-point copy; matmuls in the precision of the
    activations. Converts to the scheme of `int8_weight_only()`.

    Args:
        stochastic_rounding: of updates; rounding to nearest loses those smaller than half a step.
    """

    stochastic_rounding: bool = True

    def linear_spec(self) -> LinearSpec:
        return LinearSpec(QuantSpec(qdtype("int8"), PerRow(), quant_min=-127, rounding=self.rounding()))


@register_recipe("int4_weight_only_quantized_training")
@dataclass(frozen=True)
class Int4WeightOnlyQuantizedTraining(_QuantizedTraining):
    """Weights in int4, two in a byte, with a scale per group.

    Args:
        group_size: elements of a row that share a scale; it divides the row.
        stochastic_rounding: of updates.
    """

    group_size: int = 32
    stochastic_rounding: bool = True

    def linear_spec(self) -> LinearSpec:
        spec = QuantSpec(qdtype("int4"), PerGroup(self.group_size), quant_min=-7, rounding=self.rounding())
        return LinearSpec(spec, layout=PackedLayout())
