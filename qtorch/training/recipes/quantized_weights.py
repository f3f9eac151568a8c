"""Quantized training: weights live in codes, without a floating-point copy, and every update of them rounds
stochastically. Matmuls are in the precision of the activations."""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from ...dtypes import PackedLayout, quantized_type
from ...model import targets, weight_kinds
from ...primitives import CodebookSpec, LinearSpec, PerGroup, QuantSpec, Rounding, qdtype
from ...primitives.covering import why_no_update
from ...primitives.layouts import smallest_layout
from ...recipes.base import Recipe, WeightRecipe, check_has_values, register_recipe
from ...recipes.integer import int8_rows
from ..quantization_aware.recipes.base import check_inference_recipe
from ..weights.codes import WeightInCodes, in_training
from .base import check_trainable, declines_experts


class _QuantizedTraining(Recipe):
    trains: ClassVar[bool] = True

    stochastic_rounding: bool

    def served(self) -> LinearSpec:
        """The spec of the converted weight."""
        raise NotImplementedError

    @property
    def rounding(self) -> Rounding:
        return Rounding.STOCHASTIC if self.stochastic_rounding else Rounding.NEAREST_EVEN

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
        self.served().weight.block_size(weight.shape)

    def apply(self, weight: Tensor) -> Tensor:
        linear = self.served()
        made = in_training(quantized_type(linear.weight).from_float(weight, linear))
        if linear.weight.scale_spec is not None:  # scales that the same values have again
            made.copy_(weight)
        return in_training(made, rounding=self.rounding)

    def has_made(self, target: targets.Target[Any]) -> bool:
        weight: Any = target.parameter
        wanted = replace(self.served().weight, rounding=self.rounding)
        return isinstance(weight, WeightInCodes) and weight.scheme.weight == wanted


@register_recipe("weight_only_quantized_training")
class WeightOnlyQuantizedTraining(_QuantizedTraining):
    """Weights in the codes of any format: integers, float8, floats of fewer bits, MX, NVFP4, tables of values.

    It begins with the codes of `weight`, of NVFP4 with a power of two as the scale that all share, and converts to what
    that serves. Scales of updates cover all values, whatever the rule of the spec is: what they clip would shrink.

    Args:
        weight: an inference recipe, such as `float8_weight_only()`, whose weights it trains; or a spec, in the layout
            that takes the fewest bytes.
        stochastic_rounding: of updates; rounding to nearest loses those smaller than half a step.

    Raises:
        TypeError: `weight` is neither.
        ValueError: a recipe that quantizes activations, or prunes; a format that updates cannot keep: codes of 1 bit or
            of more than 8, vectors, powers; zero points that are real numbers; scales in integers; tables by k-means.
    """

    weight: QuantSpec | CodebookSpec | WeightRecipe
    stochastic_rounding: bool = True

    def __post_init__(self) -> None:
        recipe = self.weight
        if not isinstance(recipe, QuantSpec | CodebookSpec):
            check_inference_recipe(recipe, self.name)
            if recipe.prunes or recipe.linear_spec().activation is not None:
                raise ValueError(f"{self.name} takes a recipe of weights alone that prunes none, got {recipe}")
        reason = why_no_update(self.served().weight)
        if reason is not None:
            raise ValueError(f"{self.name}: {reason}")

    def served(self) -> LinearSpec:
        if isinstance(self.weight, WeightRecipe):
            return self.weight.linear_spec()
        return LinearSpec(self.weight.to_nearest(), layout=smallest_layout(self.weight.dtype))


@register_recipe("int8_weight_only_quantized_training")
class Int8WeightOnlyQuantizedTraining(_QuantizedTraining):
    """`weight_only_quantized_training(int8_weight_only())`: int8 with a scale per output channel.

    Args:
        stochastic_rounding: of updates; rounding to nearest loses those smaller than half a step.
    """

    stochastic_rounding: bool = True

    def served(self) -> LinearSpec:
        return LinearSpec(int8_rows(None))


@register_recipe("int4_weight_only_quantized_training")
class Int4WeightOnlyQuantizedTraining(_QuantizedTraining):
    """`weight_only_quantized_training` of symmetric int4, two in a byte, with a scale per group.

    Args:
        group_size: elements of a row that share a scale; it divides the row.
        stochastic_rounding: of updates.
    """

    group_size: int = 32
    stochastic_rounding: bool = True

    def served(self) -> LinearSpec:
        return LinearSpec(QuantSpec(qdtype("int4"), PerGroup(self.group_size), quant_min=-7), layout=PackedLayout())
