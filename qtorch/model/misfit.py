"""Misfits: what becomes of weights that groups do not divide; and which of a tuple of recipes a weight gets."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor, nn

from ..dtypes import PaddedWeight, QuantizedTensor
from ..primitives import granularity
from ..recipes.base import OfRecipe, Recipe, WeightRecipe, register_recipe
from .targets import Refused, Target

if TYPE_CHECKING:
    from ..calibration.statistics import Statistics

OnMisfit = Literal["error", "pad", "coarser", "skip"]
"""What becomes of a weight whose contracted axis the groups of its recipe do not divide; see `quantize_`."""

SMALLEST_GROUP = 8
"""Groups of fewer elements have more bytes of scales than of codes."""


@register_recipe("padded")
class Padded(OfRecipe):
    """`recipe`, for inference and without data, for weights whose contracted axis its groups do not divide: the last
    group is completed with `padding` columns of zeros.

    The weight keeps its shape, and is held with the zeros, see `PaddedWeight`; products pad their input with as many.
    """

    recipe: WeightRecipe
    padding: int

    def act_scale(self, device: Any) -> Tensor | None:
        return self.recipe.act_scale(device)

    def check(self, weight: Tensor) -> None:
        self.recipe.check(self._padded(weight))

    def check_form(self, weight: Tensor) -> None:
        self.recipe.check_form(self._padded(weight))

    def apply(self, weight: Tensor) -> Tensor:
        made = self.recipe.apply(self._padded(weight))
        assert isinstance(made, QuantizedTensor)
        return PaddedWeight.of(made, weight.shape)

    def check_target(self, target: Target[Any]) -> None:
        if target.kind.is_conv:
            raise ValueError("is the weight of a convolution, which is not padded")
        super().check_target(target)

    def make(self, target: Target[Any], weight: Tensor, statistics: "Statistics | None" = None) -> Any:
        made: Any = self.apply(target.kind.to_matrix(weight))
        return made.mT if target.kind.is_transposed else made

    def _padded(self, weight: Tensor) -> Tensor:
        return nn.functional.pad(weight, (0, self.padding))


Check = Callable[[Recipe, Target[Any]], None]
"""Raises `ValueError` or `TypeError` if a recipe does not fit a target."""


def choose(targets: Sequence[Target[Any]], on_misfit: str, check: Check = Recipe.check_target) -> None:
    """Give each target one recipe that fits it, if there is one: of a tuple the first, else as `on_misfit` says."""
    if on_misfit not in get_args(OnMisfit):
        raise Refused(f"on_misfit is {', '.join(map(repr, get_args(OnMisfit)))}, got {on_misfit!r}")
    for target in targets:
        if isinstance(target.recipe, tuple):
            _give(target, _first(target, target.recipe, check), "None is the first of its recipes that fits")
        recipe = target.recipe
        if recipe is None or on_misfit == "error" or target.obstacle:
            continue
        try:
            check(recipe, target)
        except granularity.IndivisibleError as error:
            _give(target, FITTING[on_misfit](target, recipe, check), f"on_misfit={on_misfit!r}: {error}")
        except (ValueError, TypeError):
            pass  # `quantize_` reports it with all others


def _give(target: Target[Any], recipe: Recipe | None, reason: str) -> None:
    for slot in target.slots:
        if slot.recipe is not None:
            slot.recipe, slot.reason = recipe, reason if recipe is None else slot.reason


def _first(target: Target[Any], recipes: Sequence[Recipe | None], check: Check) -> Recipe | None:
    """The first recipe that fits; if there is none, the last, whose error is reported."""
    for recipe in recipes:
        if recipe is None:
            return None
        with suppress(ValueError, TypeError):
            if not recipe.has_made(target):
                check(recipe, target)
            return recipe
    return recipes[-1]


def pad(target: Target[Any], recipe: Any, check: Check) -> Any:
    """`recipe`, with the last group completed, or the last super-block; itself where that is not possible."""
    if not isinstance(recipe, WeightRecipe) or target.kind.is_conv:
        return recipe
    if recipe.data is not None or recipe.trains or recipe.branch_rank:
        return recipe
    shape = target.kind.matrix_shape(target.parameter.shape)
    spec = recipe.linear_spec()
    of = [each.granularity.pattern(len(shape))[-1] for each in (spec.weight, spec.activation) if each is not None]
    size = math.lcm(*[max(1, length) for length in of])
    scales = spec.weight.scale_spec
    groups = 1 if scales is None else max(1, scales.granularity.pattern(len(shape))[-1])
    for block in (size, size * groups):
        padded = Padded(recipe, -shape[-1] % block)
        with suppress(ValueError, TypeError):
            check(padded, target)
            return padded
    return recipe


def coarser(target: Target[Any], recipe: Recipe, check: Check = Recipe.check_target) -> Recipe:
    """`recipe` with another group size that divides the contracted axis: the largest up to its own that kernels read
    (they prefer multiples of 32, 16 and 8), else the whole axis. Itself if there is none, or it has no group size."""
    inner = getattr(recipe, "recipe", None)
    has_groups: Any = recipe if inner is None else inner
    asked = getattr(has_groups, "group_size", None)
    if not isinstance(asked, int):
        return recipe
    length = target.kind.matrix_shape(target.parameter.shape)[-1]
    divisors = [size for size in range(SMALLEST_GROUP, min(asked, length) + 1) if length % size == 0]
    for size in [*sorted(divisors, key=lambda size: (math.gcd(size, 32), size), reverse=True), length]:
        with suppress(ValueError, TypeError):
            fitting: Any = replace(has_groups, group_size=size)
            fitting = fitting if inner is None else replace(recipe, recipe=fitting)  # type: ignore[type-var]
            check(fitting, target)
            return fitting
    return recipe


FITTING: Mapping[str, Callable[[Target[Any], Recipe, Check], Recipe | None]] = {
    "pad": pad,
    "coarser": coarser,
    "skip": lambda target, recipe, check: None,
}
"""Word of `on_misfit` -> what a misfit gets in place of its recipe, None to leave it in floating point."""
