"""The part of `quantize_` that runs the model on data, for recipes that ask for it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..model.install import all_or_nothing, restored
from ..model.report import CalibrationEstimate, CalibrationReport, TransformReport
from ..model.targets import Refused, Target
from ..primitives.jsonable import construct
from ..recipes.base import Calibrated, Recipe
from .data import Data, collect
from .engine.estimate import estimate
from .engine.in_order import InOrder
from .engine.progress import Progress, Resumable, fingerprint, fingerprint_of_data, fingerprint_of_weights
from .statistics import Statistic, Statistics


@contextmanager
def from_data(
    model: nn.Module, targets: Sequence[Target[Recipe]], dry_run: bool, resume: str | os.PathLike[str] | None
) -> Iterator[tuple[Any, ...]]:
    """What data say, for a call of `quantize_`: the reports of transforms, which stay unless it raises or is a dry run,
    statistics for each weight, the estimate of a dry run, and the weights that were made in the order of the model."""
    with transformed(model, targets, keep=not dry_run) as transforms:
        statistics = statistics_of(model, targets)
        expected = estimate_of(model, targets) if dry_run else None
        yield transforms, statistics, expected, {} if dry_run else made_in_order(model, targets, resume)


def statistics_of(model: nn.Module, targets: Sequence[Target[Recipe]]) -> dict[Tensor, Statistics]:
    """The statistics that recipes request, from one run of the model for all recipes that share their data."""
    wanted: dict[int, tuple[Data, dict[Tensor, Sequence[type[Statistic]]]]] = {}
    for target in targets:
        recipe = target.recipe
        if recipe is not None and not recipe.in_order and (data := recipe.data) is not None:
            wanted.setdefault(id(data.batches), (data, {}))[1][target.parameter] = recipe.statistics
    found: dict[Tensor, Statistics] = {}
    transposed = {id(target.parameter) for target in targets if target.kind.is_transposed}
    for data, of_weights in wanted.values():
        found.update(collect(model, data, of_weights, transposed))
    return found


def made_in_order(
    model: nn.Module, targets: Sequence[Target[Recipe]], resume: str | os.PathLike[str] | None = None
) -> dict[Tensor, Calibrated]:
    """The weights of the recipes that quantize in the order of the model, made; `resume`: see `quantize_`."""
    chosen = in_order(targets)
    if not chosen:
        if resume is not None:
            raise Refused("resume= is for recipes that calibrate in the order of the model; leave it out")
        return {}
    data = shared_data(chosen)
    if resume is None:
        return _quantized(model, chosen, data, Progress())
    data = replace(data, batches=data.checked())
    with progress_in(Path(resume), chosen, data, fingerprint_of_weights(model)) as progress:
        return progress.run(lambda: _quantized(model, chosen, data, progress))


def _quantized(
    model: nn.Module, targets: Sequence[Target[Recipe]], data: Data, progress: Progress[Calibrated]
) -> dict[Tensor, Calibrated]:
    """Batches give statistics of the inputs of a weight, these its codes, and with them the model runs on."""
    with InOrder(model, targets, data, progress) as run:
        for target, statistics in run:
            assert target.recipe is not None
            run.install(target, target.recipe.make_in_order(target, target.parameter.detach(), statistics))
    return run.made


def estimate_of(model: nn.Module, targets: Sequence[Target[Recipe]]) -> CalibrationEstimate | None:
    """What the recipes that quantize in the order of the model will take; None without such recipes."""
    chosen = in_order(targets)
    return estimate(model, chosen, shared_data(chosen)) if chosen else None


def in_order(targets: Sequence[Target[Recipe]]) -> list[Target[Recipe]]:
    """Those whose recipes quantize in the order of the model."""
    return [target for target in targets if target.recipe is not None and target.recipe.in_order]


def shared_data(targets: Sequence[Target[Recipe]]) -> Data:
    """The data of these targets."""
    found = [target.recipe.data for target in targets if target.recipe is not None]
    if found[0] is None or any(other is None or other.batches is not found[0].batches for other in found):
        raise Refused("recipes that calibrate in the order of the model take the same data; nothing is changed")
    return found[0]


def progress_in(
    folder: Path, targets: Sequence[Target[Recipe]], data: Data, weights: str, *, anew: bool = False
) -> Resumable[Calibrated]:
    """The progress of a calibration that is kept in `folder`; `anew` begins anew if that is of something else."""
    recipes = {target.slot.name: str(target.recipe) for target in targets}
    parts = {"weights": weights, "data": fingerprint_of_data(data), "recipe": fingerprint(recipes)}
    return Resumable(folder, parts, lambda made: (made.weight, asdict(made.report)), _decoded, anew=anew)


def _decoded(weight: Tensor, row: Any) -> Calibrated:
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.80} is no report on a calibration")
    return Calibrated(weight, construct(CalibrationReport, row))


@contextmanager
def transformed(
    model: nn.Module, targets: Sequence[Target[Recipe]], keep: bool
) -> Iterator[tuple[TransformReport, ...]]:
    """Apply the transforms of the recipes of `targets`, once for the whole model; `targets` get the new parameters. An
    exception restores all modules; without `keep` they are restored in any case."""
    recipes = [target.recipe for target in targets if target.recipe is not None and target.recipe.transforms]
    if not recipes:
        yield ()
        return
    first = recipes[0]
    for other in recipes[1:]:
        same_data = first.data is not None and other.data is not None and first.data.batches is other.data.batches
        if tuple(other.transforms) != tuple(first.transforms) or not same_data:
            raise Refused(
                "transforms change the whole model: all recipes that have any take the same ones, and the same data; "
                "nothing is changed"
            )
    with (all_or_nothing if keep else restored)(model.modules()):
        reports = first.transform(model, targets)
        for target in targets:
            for slot in target.slots:
                parameter = slot.module._parameters[slot.attribute]
                assert parameter is not None
                slot.parameter = parameter
        yield reports
