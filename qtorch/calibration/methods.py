"""Recipes that are calibrated by name: gptq, auto and observed are spellings of `calibrated`, and importance_weighted
fits look-up tables to the inputs of a layer.

`with_data` takes the name of a method, for configurations and the command line. `auto` is the combination of
algorithms that lost least in our measurements (docs/guides/calibration).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, overload

from torch import Tensor, nn

from ..dtypes import LUTQuantizedTensor
from ..primitives import CodebookSpec
from ..recipes.base import OfRecipe, Recipe, WeightRecipe, register_recipe
from .calibrated import CalibratedRecipe
from .data import Data
from .observers import Observer
from .rounding import AutoRound, Descent, FloatTarget, Gptq, Nearest, ScaleRefit, ScaleSearch
from .statistics import MeanSquare, Statistic, Statistics
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


@register_recipe("importance_weighted")
class ImportanceWeighted(OfRecipe):
    """`recipe` with tables fitted by k-means weighted by the mean square of each input, E[x_k^2], over `batches`.

    It minimizes

        sum_k E[x_k^2] (w[n, k] - table[code[n, k]] * scale[n])^2

    which is the error of the output of the layer for inputs with uncorrelated elements (SqueezeLLM, arXiv 2306.07629,
    section 4.1, with the inputs of the layer in place of the gradients of the loss).

    Args:
        recipe: a recipe whose tables are fitted by k-means: `lut_weight_only`.
        batches: inputs of the model; a mapping is passed as keyword arguments, a tuple or list as arguments, any other
            value as the only one.
        forward: called as ``forward(model, batch)`` instead of the model.

    Raises:
        ValueError: the tables of the recipe are not fitted by k-means.
    """

    statistics: ClassVar[tuple[type[Statistic], ...]] = (MeanSquare,)

    recipe: WeightRecipe
    batches: Iterable[Any] = field(repr=False, compare=False)
    forward: Callable[[nn.Module, Any], Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        weight = self.linear_spec().weight
        if not isinstance(weight, CodebookSpec) or weight.table is not None or self.recipe.branch_rank:
            raise ValueError(
                f"importance_weighted takes a recipe whose tables are fitted by k-means, such as "
                f"lut_weight_only(bits=3), got {self.recipe}"
            )

    @property
    def data(self) -> Data:
        return Data(self.batches, self.forward)

    def apply_calibrated(self, weight: Tensor, statistics: Statistics) -> Tensor:
        seen = statistics[MeanSquare]
        assert isinstance(seen, MeanSquare)
        return LUTQuantizedTensor.from_float(weight, self.linear_spec(), seen.mean.to(weight.device).expand_as(weight))


importance_weighted = ImportanceWeighted


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
