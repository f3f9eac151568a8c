"""calibrated: a recipe whose codes are chosen by the output of the layer on data, in the order of the model.

Weights are rounded one after the other, each with the inputs that it meets once those before it are quantized. A
rounding algorithm chooses codes on the grid of the recipe, by default GPTQ on the target W*; refinements improve them.
`gptq(recipe, batches)` and `auto(recipe, batches)` are the common cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..dtypes import quantized_type
from ..primitives import LinearSpec
from ..recipe import Calibrated, ExpertStatistics, WeightRecipe, register_recipe
from ..report import CalibrationReport
from ..statistics import Data, Moments, SecondMoment, Statistic, Statistics
from .observers import Observer, observer_of
from .rounding import FloatTarget, Gptq, Grid, Nearest, Refinement, Rounding, damped, loss
from .static_activation import StaticActivation, without_scale


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
        observer: how the scale of a static activation is chosen, from the inputs of the model as quantized so far: an
            observer, or the word for one; None is `mse()`. Weights with one input have one scale, and so have the
            experts of one parameter. For recipes that leave the scale out.
        forward: called as ``forward(model, batch)`` instead of the model.
        mask: batch -> (sequences, tokens), 1 for tokens that count; by default the ``attention_mask`` of a mapping.
        strict: raise `ValueError` for a weight that would be rounded without data.

    Raises:
        ValueError: the recipe prunes weights or changes their scales itself; an observer for a recipe without static
            activations, or with a scale of its own.
    """

    in_order: ClassVar[bool] = True
    recipe: WeightRecipe
    batches: Iterable[Any] = field(repr=False, compare=False)
    target: FloatTarget | None = FloatTarget()
    rounding: Rounding = Gptq()
    refine: tuple[Refinement, ...] = ()
    observer: Observer | str | None = None
    forward: Callable[[nn.Module, Any], Any] | None = field(default=None, repr=False, compare=False)
    mask: Callable[[Any], Tensor] | None = field(default=None, repr=False, compare=False)
    strict: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "refine", tuple(self.refine))
        if not isinstance(self.recipe, WeightRecipe) or isinstance(self.recipe, CalibratedRecipe):
            raise ValueError(f"calibrated takes a recipe for inference such as int4_weight_only(), got {self.recipe}")
        if self.recipe.prunes:
            raise ValueError(f"calibrated: {self.recipe} prunes weights, which is not calibrated; use it without data")
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
        plain = self.target is None and isinstance(self.rounding, Nearest) and not self.refine
        return self.lacks_scale and plain

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

    def apply(self, weight: Tensor) -> Tensor:
        return self.recipe.apply(weight)

    @torch.no_grad()
    def calibrate(self, weight: Tensor, statistics: Statistics | ExpertStatistics) -> Calibrated:
        activation = StaticActivation.given_by(self.recipe, weight.device)
        if self.lacks_scale:
            activation = StaticActivation.observed(self.recipe, self._observer, statistics, weight)
        if self._only_observes:
            assert activation is not None
            made, report = self._nearest(weight), CalibrationReport("nearest", activation.rows, None, None, 0, 0)
        elif weight.dim() == 2:
            made, report = self._calibrate_matrix(weight, statistics)  # type: ignore[arg-type]
        else:
            each = [self._calibrate_matrix(matrix, statistics.get(i, {})) for i, matrix in enumerate(weight)]  # type: ignore[call-overload]
            made = torch.cat([tensor.unsqueeze(0) for tensor, _ in each])
            report = _combined([report for _, report in each])
        if activation is None:
            return Calibrated(made, report)
        return Calibrated(activation.attached(made), replace(report, input_range=activation.range))  # type: ignore[arg-type]

    def _nearest(self, weight: Tensor) -> Tensor:
        """The weight as the recipe rounds it; without the scale of a static activation."""
        spec = self.linear_spec()
        return (
            quantized_type(spec.weight).from_float(weight, without_scale(spec)) if spec.static else self.apply(weight)
        )

    def _calibrate_matrix(self, weight: Tensor, statistics: Statistics) -> Calibrated:
        begun = time.perf_counter()
        moments = statistics.get(self._moments)
        if not isinstance(moments, SecondMoment) or not moments.rows:
            if self.strict:
                raise ValueError(
                    "calibrated: the weight was not used by any batch; leave out strict=True to round it to nearest"
                )
            return Calibrated(self._nearest(weight), CalibrationReport("nearest: not used by the data", 0, 0, 0, 0, 0))
        moment, spec = moments.mean.to(weight.device), self.linear_spec()
        goal = weight.float()
        if self.target is not None and isinstance(moments, Moments) and moments.cross is not None:
            goal = self.target.of(goal, moment, moments.cross.to(weight.device))
        grid = Grid.of(goal, spec.weight, weight.dtype, moment.diagonal())
        nearest = _relative(goal - grid.values(), moment, goal)
        damping = self.rounding.round(goal, moment, grid)
        for step in self.refine:
            grid = step.refine(goal, damped(moment, damping), grid)
        error = _relative(goal - grid.values(), moment, goal)
        made = grid.quantized(without_scale(spec))
        words = [type(self.rounding).__name__.lower(), *(type(step).__name__.lower() for step in self.refine)]
        seconds = time.perf_counter() - begun
        return Calibrated(made, CalibrationReport(" + ".join(words), moments.rows, error, nearest, damping, seconds))


def _relative(error: Tensor, moment: Tensor, weight: Tensor) -> float:
    return float(loss(error, moment).sum() / loss(weight, moment).sum().clamp(min=torch.finfo(torch.float32).tiny))


def _combined(reports: list[CalibrationReport]) -> CalibrationReport:
    """The report on a weight of experts."""
    counted = [report for report in reports if report.tokens]
    if not counted:
        return reports[0]
    method = counted[0].method
    if missing := len(reports) - len(counted):
        method += f"; {missing} of {len(reports)} experts to nearest: not used by the data"
    return replace(
        counted[0],
        method=method,
        tokens=min(report.tokens for report in reports),
        error=sum(report.error or 0.0 for report in counted) / len(counted),
        nearest_error=sum(report.nearest_error or 0.0 for report in counted) / len(counted),
        damping=max(report.damping for report in counted),
        seconds=sum(report.seconds for report in reports),
    )


calibrated = CalibratedRecipe
