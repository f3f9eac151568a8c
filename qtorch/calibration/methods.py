"""Recipes that are calibrated by name: gptq, auto and observed are spellings of `calibrated`.

`with_data` takes the name of a method, for configurations and the command line. `auto` is the combination of
algorithms that lost least in our measurements (docs/guides/calibration).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

from torch import Tensor, nn

from ..recipes.base import Recipe, WeightRecipe
from .calibrated import CalibratedRecipe
from .observers import Observer
from .rounding import AutoRound, Descent, FloatTarget, Gptq, Nearest, ScaleRefit, ScaleSearch
from .transforms import Transform


@overload
def gptq(*, damping: float = ..., act_order: bool = ..., block_size: int = ...) -> Gptq: ...


@overload
def gptq(
    recipe: WeightRecipe,
    batches: Iterable[Any],
    *,
    damping: float = ...,
    act_order: bool = ...,
    block_size: int = ...,
    forward: Callable[[nn.Module, Any], Any] | None = ...,
    mask: Callable[[Any], Tensor] | None = ...,
    transforms: Sequence[Transform] = ...,
    strict: bool = ...,
    all_experts: bool = ...,
) -> CalibratedRecipe: ...


def gptq(
    recipe: WeightRecipe | None = None,
    batches: Iterable[Any] | None = None,
    *,
    damping: float = 0.01,
    act_order: bool = True,
    block_size: int = 128,
    **options: Any,
) -> Gptq | CalibratedRecipe:
    """`recipe` with codes chosen by GPTQ on `batches`; without them, the algorithm, for `calibrated(rounding=...)`.

    Args:
        recipe, batches, options: see `calibrated`. The weight itself is rounded, not the float target.
        damping, act_order, block_size: see `Gptq`.

    Raises:
        ValueError: one of `recipe` and `batches` is missing.
    """
    rounding = Gptq(damping, act_order, block_size)
    if recipe is None and batches is None and not options:
        return rounding
    if recipe is None or batches is None:
        raise ValueError("gptq: takes a recipe and batches, gptq(int4_weight_only(), batches), or neither")
    return CalibratedRecipe(recipe, batches, target=None, rounding=rounding, **options)


def auto(
    recipe: WeightRecipe,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    mask: Callable[[Any], Tensor] | None = None,
    learn: AutoRound | None = None,
    transforms: Sequence[Transform] = (),
    strict: bool = False,
    all_experts: bool = False,
) -> CalibratedRecipe:
    """GPTQ against the outputs of the float model, then coordinate descent and refitted scales.

    With at least 32 tokens for each input of a layer, GPTQ and the first descent run with the scales of the recipe and
    with those of a search, and each row goes on with the better ones.

    Args:
        learn: `AutoRound()` improves all weights of a block together in the end; it takes several times as long.
        recipe, batches, forward, mask, transforms, strict, all_experts: see `calibrated`.
    """
    options: dict[str, Any] = {"forward": forward, "mask": mask, "strict": strict, "transforms": transforms}
    options["all_experts"] = all_experts
    options |= {"target": FloatTarget(damping=0.1), "rounding": Gptq(damping=0.1), "scales": ScaleSearch(tokens=32)}
    return CalibratedRecipe(recipe, batches, refine=(Descent(), ScaleRefit(), Descent()), learn=learn, **options)


def observed(
    recipe: WeightRecipe,
    batches: Iterable[Any],
    *,
    observer: Observer | str | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    mask: Callable[[Any], Tensor] | None = None,
) -> CalibratedRecipe:
    """`recipe` with the scale of each activation chosen on `batches`, and weights rounded to nearest.

    This is `calibrated` without second moments: it costs little more than running the model.

    Args:
        recipe: with static activations and without a scale: `int8_static_activation_int8_weight()`.
        batches, observer, forward, mask: see `calibrated`.

    Raises:
        ValueError: the recipe has no scale to choose.
    """
    plain: dict[str, Any] = {"target": None, "rounding": Nearest()}
    return CalibratedRecipe(recipe, batches, observer=observer or "mse", forward=forward, mask=mask, **plain)


METHODS: dict[str, Callable[[Any, Iterable[Any]], Any]] = {"auto": auto, "gptq": gptq}

Method = str | Callable[[Any, Iterable[Any]], Any]
"""A name in `METHODS`, or a function (recipe, batches) -> recipe."""


def with_data(recipe: Any, batches: Iterable[Any], method: Method) -> Any:
    """The recipe, or the mapping from names to recipes, by a method; recipes that have data, and None, stay."""
    if isinstance(method, str) and method not in METHODS:
        raise ValueError(f"calibration: there is no method {method!r}; known are {', '.join(sorted(METHODS))}")
    make = METHODS[method] if isinstance(method, str) else method
    if isinstance(recipe, Mapping):
        return {name: with_data(each, batches, method) for name, each in recipe.items()}
    if recipe is None or (isinstance(recipe, Recipe) and recipe.data is not None):
        return recipe
    if not isinstance(recipe, WeightRecipe):
        raise ValueError(f"calibration: takes recipes for inference such as int4_weight_only(), got {recipe}")
    return make(recipe, batches)
