"""calibrated: a recipe whose codes are chosen by the output of the layer on data, in the order of the model.

Weights are rounded one after the other, each with the inputs that it meets once those before it are quantized: data
gives statistics (`engine`), a rounding algorithm chooses codes by them (`rounding`), by default GPTQ on the target W*,
refinements improve the codes, and the quantized weight is made of them. `methods` has the common cases by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..dtypes import AffineQuantizedTensor, QuantizedTensor, quantized_type
from ..model.report import CalibrationReport, TransformReport
from ..model.targets import Refused, Target
from ..primitives import QuantSpec, RotatedSpec
from ..recipes.base import Branch, Calibrated, ExpertStatistics, OfRecipe, WeightRecipe, register_recipe
from .data import Data
from .engine.in_order import BlockLearner
from .observers import Observer, observer_of
from .rounding import AutoRound, FloatTarget, Gptq, Grid, Learnable, Nearest, Refinement, Rounding, ScaleSearch
from .rounding.grid import damped, factor, loss, saliency
from .statistics import Moments, NoInputs, SecondMoment, Statistic, Statistics
from .transforms import Transform, run_transforms

BRANCH_DAMPING = 0.01
"""Of H, where it says which approximation of low rank is best."""


@dataclass(frozen=True, eq=False)
class RoundedMatrix:
    """A matrix on a grid: `goal`, W or the float target W* (N, K) fp32, or what `branch` leaves of it, rounded for
    inputs of `moment` E[x x^T] (K, K), which is None if the data did not use the matrix."""

    grid: Grid
    goal: Tensor
    moment: Tensor | None
    report: CalibrationReport
    branch: Branch | None = None

    @classmethod
    def nearest(cls, weight: Tensor, recipe: WeightRecipe, method: str) -> RoundedMatrix:
        """`weight` rounded to nearest without data, because of what `method` says."""
        report = CalibrationReport(method, 0, None, None, 0, 0)
        turned, spec = without_rotation(recipe.linear_spec().weight)
        rounded = lambda rest: Grid.of(turned(rest), spec, weight.dtype)  # noqa: E731
        values = lambda grid: turned(grid.values())  # noqa: E731
        grid, branch = recipe.fit(weight.float(), weight.dtype, None, rounded, values)
        return cls(grid, turned(weight.float()), None, report, branch)

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


def without_rotation(spec: Any) -> tuple[Callable[[Tensor], Tensor], Any]:
    """The rotation of a matrix before it is quantized, which undoes itself, and the spec of what it gives; the identity
    and `spec` where there is none."""
    return (spec.rotated, spec.unrotated) if isinstance(spec, RotatedSpec) else (lambda matrix: matrix, spec)


def best_rows(goal: Tensor, moment: Tensor, grids: Sequence[Grid]) -> Grid:
    """Each row from the grid with the least error of its output; the whole of one if rows share scales or tables."""
    if len(grids) == 1:
        return grids[0]
    errors = torch.stack([loss(goal - grid.values(), moment) for grid in grids])
    whole = int(errors.sum(1).argmin())
    if not grids[0].has_own_rows:
        return grids[whole]
    best = errors.argmin(0)
    found = grids[0]
    for index, grid in enumerate(grids[1:], 1):
        found = found.with_rows(best == index, grid)
    if found.spec.scale_spec is None or bool(loss(goal - found.values(), moment).sum() <= errors[whole].sum()):
        return found
    return grids[whole]  # scales that are quantized themselves changed with those of other rows


def relative_loss(error: Tensor, moment: Tensor, weight: Tensor) -> float:
    """tr(D H D^T) / tr(W H W^T)."""
    return float(loss(error, moment).sum() / loss(weight, moment).sum().clamp(min=torch.finfo(torch.float32).tiny))


def combined_report(reports: Sequence[CalibrationReport]) -> CalibrationReport:
    """The report on a weight of several matrices, such as the experts of a layer."""
    counted = [report for report in reports if report.error is not None]
    if not counted or len(reports) == 1:
        return reports[0]
    method = counted[0].method
    if missing := len(reports) - len(counted):
        method += f"; {missing} of {len(reports)} experts to nearest: not used by the data"
    if short := sum(report.is_short for report in counted):
        method += f"; {short} of {len(reports)} experts saw fewer tokens than they have inputs"
    return replace(
        counted[0], method=method, tokens=min(report.tokens for report in reports),
        error=sum(report.error or 0.0 for report in counted) / len(counted),
        nearest_error=sum(report.nearest_error or 0.0 for report in counted) / len(counted),
        damping=max(report.damping for report in counted), seconds=sum(report.seconds for report in reports),
    )  # fmt: skip


class StaticActivation(NamedTuple):
    """The fixed scale of a static activation, (1, 1), as an observer chooses it or as the recipe gives it; `range` is
    (low, high) of the reals that the codes stand for, seen in so many rows, None if the scale was given."""

    spec: QuantSpec
    scale: Tensor
    zero_point: Tensor | None = None
    range: tuple[float, float] | None = None
    rows: int = 0

    @classmethod
    def of(
        cls, recipe: WeightRecipe, observer: Observer, statistics: Statistics | ExpertStatistics, weight: Tensor
    ) -> StaticActivation | None:
        """That of the inputs of `weight`, which has one scale, also for all its experts; None for other recipes."""
        linear = recipe.linear_spec()
        spec = linear.activation
        if not linear.static or spec is None:
            return None
        if (given := recipe.act_scale(weight.device)) is not None:
            return cls(spec, given)
        if (shape := spec.scale_shape((1, weight.shape[-1]))) != (1, 1):
            raise ValueError(f"observers choose one scale for the input of a layer, {recipe} has {shape[-1]}")
        of_all: Any = statistics
        if observer.statistic not in of_all:  # experts have one together
            of_all = next((found for found in of_all.values() if isinstance(found, dict)), {})
        seen = of_all.get(observer.statistic)
        if seen is None or not seen.rows:
            why = "no batch has used this weight in a product; give ones that reach it, or None for it in a mapping"
            why = why if seen is None else "each row of the inputs of this weight has a NaN or an infinity"
            raise ValueError(f"{recipe} takes the scale of the activation from data, and {why}")
        low, high = (end.float().reshape(1, 1).to(weight.device) for end in observer.range(seen, spec))
        scale, zero_point = spec.choose_qparams_from_range(low, high)
        codes = torch.tensor([spec.code_range], device=scale.device, dtype=torch.float32).to(spec.dtype.storage)
        clipped_at = spec.dequantize(codes, scale, zero_point)[0].tolist()
        return cls(spec, scale, zero_point, tuple(clipped_at), seen.rows)

    def attached(self, weight: QuantizedTensor) -> QuantizedTensor:
        """`weight`, whose input is quantized by this."""
        assert isinstance(weight, AffineQuantizedTensor)
        return weight.with_activation(self.spec, self.scale, self.zero_point)


@register_recipe("calibrated")
class CalibratedRecipe(OfRecipe):
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
        all_experts: the experts of a mixture are calibrated on all tokens too, each of which counts for 3% of one
            that the router sends to the expert; for those in one parameter, called as in transformers. Experts that
            see few or no tokens gain by it. The experts then run on all tokens, which takes time.
        transforms: of the float weights of the whole model, in this order, before any is rounded.
        forward: called as ``forward(model, batch)`` instead of the model.
        mask: batch -> (sequences, tokens), 1 for tokens that count; by default the ``attention_mask`` of a mapping.
        strict: raise `ValueError` for a weight that would be rounded without data, and for a transform that cannot be
            done or has to be undone.

    Raises:
        ValueError: `learn` for a recipe that prunes weights or has a branch of low rank; an observer for a
            recipe without static activations, or with a scale of its own.
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
    all_experts: bool = False
    transforms: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "refine", tuple(self.refine))
        object.__setattr__(self, "transforms", tuple(self.transforms))
        if self.transforms and isinstance(self.batches, Iterator):
            object.__setattr__(self, "batches", list(self.batches))  # they are read more than once
        if isinstance(self.recipe, CalibratedRecipe):
            raise ValueError(f"calibrated takes a recipe for inference such as int4_weight_only(), got {self.recipe}")
        if self.recipe.prunes and self.learn is not None:
            raise ValueError(f"calibrated: {self.recipe} prunes weights, which learn={self.learn} does not keep zero")
        if self.branch_rank and self.learn is not None:
            raise ValueError(f"calibrated: learn={self.learn} learns no branch of low rank, got {self.recipe}")
        if self.observer is not None:
            object.__setattr__(self, "observer", observer_of(self.observer, "calibrated"))
            if not self.lacks_scale:
                raise ValueError(
                    f"calibrated: {self.recipe} leaves no scale of a static activation to an observer; a recipe that "
                    "does is int8_static_activation_int8_weight()"
                )
        super().__post_init__()

    @property
    def branch_rank(self) -> int:  # type: ignore[override]
        return self.recipe.branch_rank

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
        return self.learn

    @torch.no_grad()
    def make_in_order(
        self, target: Target[Any], weight: Tensor, statistics: Statistics | ExpertStatistics
    ) -> Calibrated:
        """The quantized weight: of a matrix, of a convolution as a matrix, or of experts matrix by matrix."""
        matrix = target.kind.to_matrix(weight)
        spec = self.linear_spec()
        if spec.static:  # the activation is attached afterwards
            spec = replace(spec, activation=None, static=False)
        try:
            activation = StaticActivation.of(self.recipe, self._observer, statistics, matrix)
            if activation is not None and self._only_observes:
                made: Any = quantized_type(spec.weight).from_float(self.recipe.prune(matrix), spec)
                report = CalibrationReport("nearest", activation.rows, None, None, 0, 0, activation.range)
                return Calibrated(target.kind.from_matrix(activation.attached(made), weight.shape), report)
            if matrix.dim() == 2:
                rounded = [self._round(matrix, statistics)]  # type: ignore[arg-type]
            else:
                # Where no expert has statistics, `NoInputs` stands for all.
                others: Any = statistics if NoInputs in statistics else {}
                of_experts: Any = {} if others else statistics
                rounded = [self._round(part, of_experts.get(index, others)) for index, part in enumerate(matrix)]
        except ValueError as error:
            raise Refused(f"{target.slot.label}: {error}; nothing is changed") from error

        def as_parameter(parts: Sequence[Tensor]) -> Tensor:
            whole = parts[0] if matrix.dim() == 2 else torch.stack(list(parts))
            return target.kind.from_matrix(whole, weight.shape)

        def quantized(grids: Sequence[Grid]) -> Tensor:
            made = [grid.quantized(spec) for grid in grids]
            whole: Any = made[0] if matrix.dim() == 2 else torch.cat([part.unsqueeze(0) for part in made])
            whole = whole if activation is None else activation.attached(whole)
            return target.kind.from_matrix(self.recipe.beside(whole, rounded[0].branch), weight.shape)

        def calibrated(parts: Sequence[RoundedMatrix], learnable: Learnable | None = None) -> Calibrated:
            report = combined_report([part.report for part in parts])
            if activation is not None:
                report = replace(report, input_range=activation.range)
            return Calibrated(quantized([part.grid for part in parts]), report, learnable)

        def with_grids(grids: Sequence[Grid], seconds: float) -> Calibrated:
            made = calibrated([part.with_grid(grid, "autoround") for part, grid in zip(rounded, grids, strict=True)])
            return made._replace(report=replace(made.report, seconds=made.report.seconds + seconds))

        if self.learn is None or isinstance(spec.weight, RotatedSpec):
            return calibrated(rounded)
        grids = [part.grid for part in rounded]
        return calibrated(
            rounded, Learnable(grids, lambda: [part.best_values() for part in rounded], as_parameter, with_grids)
        )

    def _rounded(self, weight: Tensor, moments: SecondMoment) -> RoundedMatrix:
        """`weight` (N, K), rounded for inputs with these `moments`. Fewer tokens than inputs leave most of H unknown:
        then it is damped K / tokens times as much."""
        begun = time.perf_counter()
        tokens = moments.count / weight.shape[1]
        few = max(1.0, 1 / tokens)
        target, rounding = self.target and self.target.damped(few), self.rounding.damped(few)
        scales = None if self.scales is None or tokens < self.scales.tokens else self.scales
        pruning = self.recipe.kept if self.recipe.prunes else None
        spec = self.linear_spec().weight
        goal = weight.float()
        moment = moments.mean.to(weight.device)
        if target is not None and isinstance(moments, Moments) and moments.cross is not None:
            residual = None if moments.residual is None else moments.residual.to(weight.device)
            goal = target.of(goal, moment, moments.cross.to(weight.device), residual)
        root = factor(moment, few * BRANCH_DAMPING)[0] if self.recipe.branch_rank else None
        turned, plain = without_rotation(spec)
        if plain is not spec:
            # Codes are chosen for the rotated weight, which meets rotated inputs.
            moment, spec = turned(turned(moment).t()), plain
        whole = turned(goal)
        mask = None if pruning is None else pruning(saliency(whole, moment))
        nearest = Grid.of(whole, spec, weight.dtype, moment.diagonal(), mask)
        nearest_error = relative_loss(whole - nearest.values(), moment, whole)

        def rounded(rest: Tensor) -> tuple[Grid, Tensor, float]:
            rest = whole if rest is goal else turned(rest)
            grid = nearest if not self.recipe.branch_rank else Grid.of(rest, spec, weight.dtype, moment.diagonal())
            starts = [grid] if scales is None else scales.starts(rest, moment, grid)
            damping = rounding.round(rest, moment, *starts)
            refined = damped(moment, damping) if self.refine else moment
            for step in self.refine:  # after the first, each row goes on with the better start
                starts = [best_rows(rest, moment, [step.refine(rest, refined, start) for start in starts])]
            return best_rows(rest, moment, starts), rest, damping

        values = lambda made: turned(made[0].values())  # noqa: E731
        (grid, rest, damping), branch = self.recipe.fit(goal, weight.dtype, root, rounded, values)
        error = relative_loss(rest - grid.values(), moment, whole)
        steps = [*([] if scales is None else [scales]), rounding, *self.refine]
        before = [*([] if pruning is None else ["prune"]), *([] if branch is None else ["low rank"])]
        method = " + ".join([*before, *(type(step).__name__.lower() for step in steps)])
        seconds = time.perf_counter() - begun
        report = CalibrationReport(method, moments.rows, error, nearest_error, damping, seconds, inputs=weight.shape[1])
        return RoundedMatrix(grid, rest, moment, report, branch)

    def _round(self, weight: Tensor, statistics: Statistics) -> RoundedMatrix:
        moments = statistics.get(self._moments)
        if isinstance(moments, SecondMoment) and moments.count:
            return self._rounded(weight, moments)
        no_inputs = statistics.get(NoInputs)
        reason = no_inputs.reason if isinstance(no_inputs, NoInputs) else "not used by the data"
        if self.strict:
            raise ValueError(f"the weight cannot be calibrated: {reason}; leave out strict=True to round it to nearest")
        return RoundedMatrix.nearest(self.recipe.prune(weight), self.recipe, f"nearest: {reason}")
