"""calibrated: a recipe whose codes are chosen by the output of the layer on data, in the order of the model.

Weights are rounded one after the other, each with the inputs that it meets once those before it are quantized. A
rounding algorithm chooses codes on the grid of the recipe, by default GPTQ on the target W*; refinements improve them.
`gptq(recipe, batches)` and `auto(recipe, batches)` are the common cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn

from ..dtypes import quantized_type
from ..model.report import CalibrationReport, TransformReport
from ..model.targets import Target
from ..primitives import LinearSpec, RotatedSpec
from ..recipes.base import Calibrated, ExpertStatistics, Recipe, WeightRecipe, register_recipe
from .data import Data
from .engine import BlockLearner, BlockRun
from .observers import Observer, observer_of
from .rounded_matrix import RoundedMatrix, StaticActivation, combined_report, round_matrix, without_scale
from .rounding import (
    AutoRound,
    Descent,
    FloatTarget,
    Gptq,
    Grid,
    Learnable,
    Nearest,
    Refinement,
    Rounding,
    ScaleRefit,
    ScaleSearch,
)
from .statistics import Missed, Moments, SecondMoment, Statistic, Statistics
from .transforms import Transform, run_transforms

# --------------------------------------------------------------------------------------------------
# BlockLearner of AutoRound: from calibrated weights to what is learned, and back.


@dataclass(frozen=True, eq=False)
class LearnableWeight:
    """A calibrated weight that can be learned further.

    Attributes:
        rounded: its matrices.
        as_parameter: matrices (N, K) -> the parameter that they stand for.
        quantized: grids of the matrices -> the quantized weight.
    """

    rounded: Sequence[RoundedMatrix]
    as_parameter: Callable[[Sequence[Tensor]], Tensor]
    quantized: Callable[[Sequence[Grid]], Tensor]


@dataclass(frozen=True)
class AutoRoundLearner:
    """AutoRound on all weights of a block that were calibrated with it."""

    algorithm: AutoRound

    def learn_block(self, run: BlockRun, made: Mapping[Tensor, Calibrated]) -> Mapping[Tensor, Calibrated]:
        """The weights with what was learned; none if the error of the block has not become less."""
        begun = time.perf_counter()
        starts = {weight: of.learnable for weight, of in made.items() if isinstance(of.learnable, LearnableWeight)}
        learnables = {}
        for weight, start in starts.items():
            grids, values = zip(*((part.grid, part.best_values()) for part in start.rounded), strict=True)
            learnables[weight] = Learnable(grids, values, start.as_parameter)
        found = self.algorithm.learn(learnables, run.loss, run.count)
        seconds = (time.perf_counter() - begun) / max(1, len(found))
        better = {}
        for weight, learned in found.items():
            start = starts[weight]
            parts = [part.with_grid(grid, "autoround") for part, grid in zip(start.rounded, learned, strict=True)]
            report = combined_report([part.report for part in parts])
            report = replace(report, seconds=report.seconds + seconds)
            better[weight] = Calibrated(start.quantized(learned), report)
        return better


@register_recipe("calibrated")
@dataclass(frozen=True)
class CalibratedRecipe(WeightRecipe):
    """`recipe` with codes that are chosen on data.

    Args:
        recipe: for inference; its spec is kept.
        batches: inputs of the model; a mapping is passed as keyword arguments, a tuple or list as arguments, any other
            value as the only one.
        target: what is rounded: the weight whose output is that of the float model, or None for the weight itself.
        rounding: how the first codes are chosen.
        refine: what improves them, in this order.
        scales: searches the scales before; None keeps those of the recipe.
        learn: what improves all weights of a block together, after the others; it takes most of the time.
        observer: how the scale of a static activation is chosen, from the inputs of the model as quantized so far: an
            observer, or the word for one; None is `mse()`. Weights with one input have one scale, and so have the
            experts of one parameter. For recipes that leave the scale out.
        transforms: of the float weights of the whole model, in this order, before any is rounded.
        forward: called as ``forward(model, batch)`` instead of the model.
        mask: batch -> (sequences, tokens), 1 for tokens that count; by default the ``attention_mask`` of a mapping.
        strict: raise `ValueError` for a weight that would be rounded without data, and for a transform that cannot be
            done or has to be undone.

    Raises:
        ValueError: `learn` for a recipe that prunes weights; an observer for a recipe without static
            activations, or with a scale of its own.
    """

    in_order: ClassVar[bool] = True
    recipe: WeightRecipe
    batches: Iterable[Any] = field(repr=False, compare=False)
    target: FloatTarget | None = FloatTarget()
    rounding: Rounding = Gptq()
    refine: tuple[Refinement, ...] = ()
    scales: ScaleSearch | None = None
    learn: AutoRound | None = None
    observer: Observer | str | None = None
    forward: Callable[[nn.Module, Any], Any] | None = field(default=None, repr=False, compare=False)
    mask: Callable[[Any], Tensor] | None = field(default=None, repr=False, compare=False)
    strict: bool = False
    transforms: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "refine", tuple(self.refine))
        object.__setattr__(self, "transforms", tuple(self.transforms))
        if self.transforms and isinstance(self.batches, Iterator):
            object.__setattr__(self, "batches", list(self.batches))  # they are read more than once
        if not isinstance(self.recipe, WeightRecipe) or isinstance(self.recipe, CalibratedRecipe):
            raise ValueError(f"calibrated takes a recipe for inference such as int4_weight_only(), got {self.recipe}")
        if self.recipe.prunes and self.learn is not None:
            raise ValueError(f"calibrated: {self.recipe} prunes weights, which learn={self.learn} does not keep zero")
        if self.observer is not None:
            object.__setattr__(self, "observer", observer_of(self.observer, "calibrated"))
            if not self.lacks_scale:
                raise ValueError(
                    f"calibrated: {self.recipe} leaves no scale of a static activation to an observer; a recipe that "
                    "does is int8_static_activation_int8_weight()"
                )
        super().__post_init__()

    def linear_spec(self) -> LinearSpec:
        return self.recipe.linear_spec()

    @property
    def lacks_scale(self) -> bool:
        return self.recipe.lacks_scale

    def check_complete(self) -> None:
        """Data has the scales."""

    @property
    def _observer(self) -> Observer:
        return observer_of(self.observer or "mse", "calibrated")

    @property
    def _only_observes(self) -> bool:
        """Whether weights are rounded to nearest, and data says no more than the range of their inputs."""
        plain = self.target is None and self.scales is None and isinstance(self.rounding, Nearest) and not self.refine
        return self.lacks_scale and plain and self.learn is None

    @property
    def _moments(self) -> type[SecondMoment]:
        return SecondMoment if self.target is None else Moments

    @property
    def statistics(self) -> tuple[type[Statistic], ...]:  # type: ignore[override]
        of_weights = () if self._only_observes else (self._moments,)
        return (*of_weights, self._observer.statistic) if self.lacks_scale else of_weights

    @property
    def data(self) -> Data:
        return Data(self.batches, self.forward, self.mask)

    def check(self, weight: Tensor) -> None:
        self.recipe.check(weight)

    def transform(self, model: nn.Module, targets: Sequence[Target[Any]]) -> tuple[TransformReport, ...]:
        recipes = {}
        for target in targets:
            recipe = target.recipe.recipe if isinstance(target.recipe, CalibratedRecipe) else target.recipe
            if isinstance(recipe, WeightRecipe) and not target.kind.is_conv:
                recipes.update({slot.name: recipe for slot in target.slots})
        return run_transforms(self.transforms, model, self.data, recipes, self.strict)

    def apply(self, weight: Tensor) -> Tensor:
        return self.recipe.apply(weight)

    @property
    def learner(self) -> BlockLearner | None:
        return None if self.learn is None else AutoRoundLearner(self.learn)

    @torch.no_grad()
    def make_in_order(
        self, target: Target[Any], weight: Tensor, statistics: Statistics | ExpertStatistics
    ) -> Calibrated:
        """The quantized weight: of a matrix, of a convolution as a matrix, or of experts matrix by matrix."""
        matrix = target.kind.to_matrix(weight)
        try:
            activation = self._activation(matrix, statistics)
            if activation is not None and self._only_observes:
                return self._observed(target, weight, matrix, activation)
            if matrix.dim() == 2:
                rounded = [self._round(matrix, statistics)]  # type: ignore[arg-type]
            else:
                # Where no expert has statistics, `Missed` stands for all.
                others: Any = statistics if Missed in statistics else {}
                of_experts: Any = {} if others else statistics
                rounded = [self._round(part, of_experts.get(index, others)) for index, part in enumerate(matrix)]
        except ValueError as error:
            raise ValueError(f"quantize_: {target.slot.label}: {error}; the model is unchanged") from error
        spec = without_scale(self.linear_spec())

        def as_parameter(parts: Sequence[Tensor]) -> Tensor:
            whole = parts[0] if matrix.dim() == 2 else torch.stack(list(parts))
            return target.kind.from_matrix(whole, weight.shape)

        def quantized(grids: Sequence[Grid]) -> Tensor:
            made = [grid.quantized(spec) for grid in grids]
            whole: Any = made[0] if matrix.dim() == 2 else torch.cat([part.unsqueeze(0) for part in made])
            return target.kind.from_matrix(whole if activation is None else activation.attached(whole), weight.shape)

        report = combined_report([part.report for part in rounded])
        if activation is not None:
            report = replace(report, input_range=activation.range)
        learnable = None
        if self.learn is not None and not isinstance(spec.weight, RotatedSpec):
            learnable = LearnableWeight(rounded, as_parameter, quantized)
        return Calibrated(quantized([part.grid for part in rounded]), report, learnable)

    def _observed(
        self, target: Target[Any], weight: Tensor, matrix: Tensor, activation: StaticActivation
    ) -> Calibrated:
        """The weight rounded to nearest, for inputs in the range that was observed."""
        spec = self.linear_spec()
        made: Any = quantized_type(spec.weight).from_float(self.recipe.prune(matrix), without_scale(spec))
        report = CalibrationReport("nearest", activation.rows, None, None, 0, 0, activation.range)
        return Calibrated(target.kind.from_matrix(activation.attached(made), weight.shape), report)

    def _activation(self, weight: Tensor, statistics: Statistics | ExpertStatistics) -> StaticActivation | None:
        if self.lacks_scale:
            return StaticActivation.observed(self.recipe, self._observer, statistics, weight)
        return StaticActivation.given_by(self.recipe, weight.device)

    def _round(self, weight: Tensor, statistics: Statistics) -> RoundedMatrix:
        spec = self.linear_spec().weight
        moments = statistics.get(self._moments)
        if isinstance(moments, SecondMoment) and moments.rows:
            kept = self.recipe.kept if self.recipe.prunes else None
            return round_matrix(weight, moments, spec, self.target, self.scales, self.rounding, self.refine, kept)
        missed = statistics.get(Missed)
        reason = missed.reason if isinstance(missed, Missed) else "not used by the data"
        if self.strict:
            raise ValueError(f"the weight cannot be calibrated: {reason}; leave out strict=True to round it to nearest")
        return RoundedMatrix.nearest(self.recipe.prune(weight), spec, f"nearest: {reason}")


calibrated = CalibratedRecipe

# --------------------------------------------------------------------------------------------------
# gptq: the rounding algorithm, and the recipe that rounds by it.


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


# --------------------------------------------------------------------------------------------------
# auto: the combination of algorithms that lost least in our measurements (docs/guides/calibration).


def auto(
    recipe: WeightRecipe,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    mask: Callable[[Any], Tensor] | None = None,
    learn: AutoRound | None = None,
    transforms: Sequence[Transform] = (),
    strict: bool = False,
) -> CalibratedRecipe:
    """GPTQ against the outputs of the float model, then coordinate descent and scale refits in turn.

    All of it is done with the scales of the recipe and with those of a search, and each row takes the better one.

    Args:
        learn: `AutoRound()` improves all weights of a block together in the end; it takes several times as long.
        recipe, batches, forward, mask, transforms, strict: see `calibrated`.
    """
    refine = (Descent(), ScaleRefit(), Descent(), ScaleRefit(), Descent())
    return CalibratedRecipe(
        recipe,
        batches,
        FloatTarget(),
        scales=ScaleSearch(),
        rounding=Gptq(),
        refine=refine,
        learn=learn,
        transforms=tuple(transforms),
        forward=forward,
        mask=mask,
        strict=strict,
    )


# --------------------------------------------------------------------------------------------------
# observed: static activations with scales from data, weights rounded to nearest.


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
    observer = "mse" if observer is None else observer
    return CalibratedRecipe(
        recipe, batches, target=None, rounding=Nearest(), observer=observer, forward=forward, mask=mask
    )


# --------------------------------------------------------------------------------------------------
# Methods of calibration by name, for those who write a name instead of a call: configurations and the command line.


METHODS: dict[str, Callable[[Any, Iterable[Any]], Any]] = {"auto": auto, "gptq": gptq}

Method = str | Callable[[Any, Iterable[Any]], Any]
"""A name in `METHODS`, or a function (recipe, batches) -> recipe."""


def with_data(recipe: Any, batches: Iterable[Any], method: Method) -> Any:
    """The recipe, or the mapping from names to recipes, by a method; recipes that have data, and None, stay.

    Raises:
        ValueError: there is no such method, or a recipe cannot be calibrated.
    """
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
