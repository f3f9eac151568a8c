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

from ..primitives import LinearSpec
from ..recipe import Calibrated, ExpertStatistics, WeightRecipe, register_recipe
from ..report import CalibrationReport
from ..statistics import Data, Missed, Moments, SecondMoment, Statistic, Statistics
from .rounding import FloatTarget, Gptq, Grid, Refinement, Rounding, damped, loss


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
        forward: called as ``forward(model, batch)`` instead of the model.
        mask: batch -> (sequences, tokens), 1 for tokens that count; by default the ``attention_mask`` of a mapping.
        strict: raise `ValueError` for a weight that would be rounded without data.

    Raises:
        ValueError: the recipe prunes weights or changes their scales itself.
    """

    in_order: ClassVar[bool] = True
    recipe: WeightRecipe
    batches: Iterable[Any] = field(repr=False, compare=False)
    target: FloatTarget | None = FloatTarget()
    rounding: Rounding = Gptq()
    refine: tuple[Refinement, ...] = ()
    forward: Callable[[nn.Module, Any], Any] | None = field(default=None, repr=False, compare=False)
    mask: Callable[[Any], Tensor] | None = field(default=None, repr=False, compare=False)
    strict: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "refine", tuple(self.refine))
        if not isinstance(self.recipe, WeightRecipe) or isinstance(self.recipe, CalibratedRecipe):
            raise ValueError(f"calibrated takes a recipe for inference such as int4_weight_only(), got {self.recipe}")
        if self.recipe.prunes:
            raise ValueError(f"calibrated: {self.recipe} prunes weights, which is not calibrated; use it without data")
        super().__post_init__()

    def linear_spec(self) -> LinearSpec:
        return self.recipe.linear_spec()

    @property
    def statistics(self) -> tuple[type[Statistic], ...]:  # type: ignore[override]
        return (SecondMoment,) if self.target is None else (Moments,)

    @property
    def data(self) -> Data:
        return Data(self.batches, self.forward, self.mask)

    def check(self, weight: Tensor) -> None:
        self.recipe.check(weight)

    def apply(self, weight: Tensor) -> Tensor:
        return self.recipe.apply(weight)

    def calibrate(self, weight: Tensor, statistics: Statistics | ExpertStatistics) -> Calibrated:
        if weight.dim() == 2:
            return self._calibrate_matrix(weight, statistics)  # type: ignore[arg-type]
        # Where no expert has statistics, `Missed` stands for all.
        others: Any = statistics if Missed in statistics else {}
        of_experts: ExpertStatistics = {} if others else statistics  # type: ignore[assignment]
        made = [self._calibrate_matrix(matrix, of_experts.get(index, others)) for index, matrix in enumerate(weight)]
        reports = [report for _, report in made]
        stacked = torch.cat([tensor.unsqueeze(0) for tensor, _ in made])
        return Calibrated(stacked, _combined(reports))

    @torch.no_grad()
    def _calibrate_matrix(self, weight: Tensor, statistics: Statistics) -> Calibrated:
        begun = time.perf_counter()
        moments = statistics.get(self.statistics[0])
        if not isinstance(moments, SecondMoment) or not moments.rows:
            missed = statistics.get(Missed)
            reason = missed.reason if isinstance(missed, Missed) else "not used by the data"
            if self.strict:
                raise ValueError(
                    f"calibrated: the weight cannot be calibrated: {reason}; leave out strict=True to round it to "
                    "nearest"
                )
            return Calibrated(self.recipe.apply(weight), CalibrationReport(f"nearest: {reason}", 0, 0, 0, 0, 0))
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
        made = grid.quantized(spec)
        if self.recipe.linear_spec().static:
            made = made.with_activation(spec.activation, self.recipe.act_scale(weight.device))  # type: ignore[call-arg]
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
        error=sum(report.error for report in counted) / len(counted),
        nearest_error=sum(report.nearest_error for report in counted) / len(counted),
        damping=max(report.damping for report in counted),
        seconds=sum(report.seconds for report in reports),
    )


calibrated = CalibratedRecipe
