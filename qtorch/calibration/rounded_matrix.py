"""Rounding one matrix: the target, the codes, the refinements, and the report on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dtypes import AffineQuantizedTensor, QuantizedTensor
from ..model.report import CalibrationReport
from ..primitives import CodebookSpec, LinearSpec, QuantSpec, RotatedSpec
from ..recipes.base import ExpertStatistics, WeightRecipe
from .observers import Observer
from .rounding import FloatTarget, Grid, Refinement, Rounding, ScaleSearch, damped, loss, saliency
from .statistics import Moments, SecondMoment, Statistic, Statistics


@dataclass(frozen=True, eq=False)
class RoundedMatrix:
    """A matrix on a grid.

    Attributes:
        grid: codes and scales.
        goal: (N, K) fp32, what was rounded: W, or the float target W*.
        moment: (K, K), E[x x^T]; None if the data did not use the matrix.
        report: how the codes were chosen.
    """

    grid: Grid
    goal: Tensor
    moment: Tensor | None
    report: CalibrationReport

    @classmethod
    def nearest(cls, weight: Tensor, spec: QuantSpec | CodebookSpec, method: str) -> RoundedMatrix:
        """`weight` rounded to nearest without data, because of what `method` says."""
        report = CalibrationReport(method, 0, None, None, 0, 0)
        if isinstance(spec, RotatedSpec):
            weight, spec = spec.rotated(weight), spec.unrotated
        return cls(Grid.of(weight, spec, weight.dtype), weight.float(), None, report)

    def best_values(self) -> Tensor:
        """(N, K): for each element the value that is best given all others, q_j + ((W - Q) H)_j / H_jj."""
        values = self.grid.values()
        if self.moment is None:
            return values
        moment = damped(self.moment, self.report.damping)
        return values + (self.goal - values) @ moment / moment.diagonal()

    def with_grid(self, grid: Grid, method: str) -> RoundedMatrix:
        """Another grid, found by `method` starting from this one."""
        error = None if self.moment is None else relative_loss(self.goal - grid.values(), self.moment, self.goal)
        report = replace(self.report, method=f"{self.report.method} + {method}", error=error)
        return replace(self, grid=grid, report=report)


@torch.no_grad()
def round_matrix(
    weight: Tensor,
    moments: SecondMoment,
    spec: QuantSpec | CodebookSpec,
    target: FloatTarget | None,
    scales: ScaleSearch | None,
    rounding: Rounding,
    refine: Sequence[Refinement],
    kept: Callable[[Tensor], Tensor] | None = None,
) -> RoundedMatrix:
    """Round `weight` (N, K) for inputs with these `moments`.

    Args:
        kept: importance -> which elements are not pruned; see `WeightRecipe.kept`.
    """
    begun = time.perf_counter()
    goal = weight.float()
    moment = moments.mean.to(weight.device)
    if target is not None and isinstance(moments, Moments) and moments.cross is not None:
        residual = moments.residual
        residual = None if residual is None else residual.to(weight.device)
        goal = target.of(goal, moment, moments.cross.to(weight.device), residual)
    if isinstance(spec, RotatedSpec):
        # Codes are chosen for the rotated weight, which meets rotated inputs.
        goal, moment, spec = spec.rotated(goal), spec.rotated(spec.rotated(moment).t()), spec.unrotated
    mask = None if kept is None else kept(saliency(goal, moment))
    grid = Grid.of(goal, spec, weight.dtype, moment.diagonal(), mask)
    nearest = relative_loss(goal - grid.values(), moment, goal)
    starts = [grid] if scales is None else scales.starts(goal, moment, grid)
    found = []
    for start in starts:
        damping = rounding.round(goal, moment, start)
        refined = damped(moment, damping) if refine else moment
        for step in refine:
            start = step.refine(goal, refined, start)
        found.append(start)
    grid = found[0] if len(found) == 1 else best_rows(goal, moment, found)
    error = relative_loss(goal - grid.values(), moment, goal)
    steps = [*([] if scales is None else [scales]), rounding, *refine]
    names = [*([] if kept is None else ["prune"]), *(type(step).__name__.lower() for step in steps)]
    method = " + ".join(names)
    seconds = time.perf_counter() - begun
    return RoundedMatrix(grid, goal, moment, CalibrationReport(method, moments.rows, error, nearest, damping, seconds))


def best_rows(goal: Tensor, moment: Tensor, grids: Sequence[Grid]) -> Grid:
    """Each row from the grid with the least error of its output; the whole of one if rows share scales or tables."""
    errors = torch.stack([loss(goal - grid.values(), moment) for grid in grids])
    if not grids[0].has_own_rows:
        return grids[int(errors.sum(1).argmin())]
    best = errors.argmin(0)
    found = grids[0]
    for index, grid in enumerate(grids[1:], 1):
        found = found.with_rows(best == index, grid)
    return found


def relative_loss(error: Tensor, moment: Tensor, weight: Tensor) -> float:
    """tr(D H D^T) / tr(W H W^T)."""
    return float(loss(error, moment).sum() / loss(weight, moment).sum().clamp(min=torch.finfo(torch.float32).tiny))


def combined_report(reports: Sequence[CalibrationReport]) -> CalibrationReport:
    """The report on a weight of several matrices, such as the experts of a layer."""
    counted = [report for report in reports if report.tokens]
    if not counted or len(reports) == 1:
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


# --------------------------------------------------------------------------------------------------
# The fixed scale of a static activation, as an observer chooses it or as the recipe gives it.


class StaticActivation(NamedTuple):
    """Attributes:
    spec: of the activation.
    scale, zero_point: (1, 1); None if it is always zero.
    range: (low, high) of the reals that the codes stand for; None if the scale was given.
    rows: the number of inputs that were seen.
    """

    spec: QuantSpec
    scale: Tensor
    zero_point: Tensor | None = None
    range: tuple[float, float] | None = None
    rows: int = 0

    @classmethod
    def given_by(cls, recipe: WeightRecipe, device: torch.device) -> StaticActivation | None:
        """That of a recipe with a scale of its own; None for other recipes."""
        spec, scale = recipe.linear_spec(), recipe.act_scale(device)
        return None if not spec.static or spec.activation is None or scale is None else cls(spec.activation, scale)

    @classmethod
    def observed(
        cls, recipe: WeightRecipe, observer: Observer, statistics: Statistics | ExpertStatistics, weight: Tensor
    ) -> StaticActivation:
        """That of a recipe without: from the inputs of `weight`, which has one scale, also for all its experts.

        Raises:
            ValueError: no input was seen, or the recipe needs more than one scale.
        """
        spec = recipe.linear_spec().activation
        assert spec is not None
        if (shape := spec.scale_shape((1, weight.shape[-1]))) != (1, 1):
            raise ValueError(f"observers choose one scale for the input of a layer, {recipe} has {shape[-1]}")
        seen = _seen(statistics, observer.statistic)
        if seen is None or not seen.rows:
            raise ValueError(
                f"{recipe} takes the scale of the activation from data, and no batch has used this weight in a "
                "product; give batches that reach it, or None for it in a mapping"
            )
        low, high = (end.float().reshape(1, 1).to(weight.device) for end in observer.range(seen, spec))
        scale, zero_point = spec.choose_qparams_from_range(low, high)
        return cls(spec, scale, zero_point, reals(spec, scale, zero_point), seen.rows)

    def attached(self, weight: QuantizedTensor) -> QuantizedTensor:
        """`weight`, whose input is quantized by this."""
        assert isinstance(weight, AffineQuantizedTensor)
        return weight.with_activation(self.spec, self.scale, self.zero_point)


def reals(spec: QuantSpec, scale: Tensor, zero_point: Tensor | None) -> tuple[float, float]:
    """What the lowest and the highest code stand for."""
    ends = torch.tensor([spec.code_range], device=scale.device, dtype=torch.float32).to(spec.dtype.storage)
    low, high = spec.dequantize(ends, scale, zero_point)[0].tolist()
    return low, high


def without_scale(spec: LinearSpec) -> LinearSpec:
    """`spec` of a weight that gets its static activation later, by `StaticActivation.attached`."""
    return replace(spec, activation=None, static=False) if spec.static else spec


def _seen(statistics: Any, kind: type[Statistic]) -> Statistic | None:
    """The statistic of a weight; experts have one together."""
    found = statistics if kind in statistics else next((s for s in statistics.values() if isinstance(s, dict)), {})
    return found.get(kind)
