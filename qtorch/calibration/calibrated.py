"""calibrated: a recipe whose codes are chosen by the output of the layer on data, in the order of the model.

Weights are rounded one after the other, each with the inputs that it meets once those before it are quantized. A
rounding algorithm chooses codes on the grid of the recipe, by default GPTQ on the target W*; refinements improve them.
`gptq(recipe, batches)` and `auto(recipe, batches)` are the common cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..blockwise import BlockLearner
from ..dtypes import quantized_type
from ..primitives import LinearSpec, RotatedSpec
from ..recipe import Calibrated, ExpertStatistics, WeightRecipe, register_recipe
from ..report import CalibrationReport, TransformReport
from ..statistics import Data, Missed, Moments, SecondMoment, Statistic, Statistics
from ..targets import Target
from .block_learner import AutoRoundLearner, LearnableWeight
from .observers import Observer, observer_of
from .rounded_matrix import RoundedMatrix, combined_report, round_matrix
from .rounding import AutoRound, FloatTarget, Gptq, Grid, Nearest, Refinement, Rounding, ScaleSearch
from .static_activation import StaticActivation, without_scale
from .transforms import Transform, run_transforms


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
            if isinstance(recipe, WeightRecipe) and not target.asked.is_conv:
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
            raise ValueError(f"quantize_: {target.asked.label}: {error}; the model is unchanged") from error
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
