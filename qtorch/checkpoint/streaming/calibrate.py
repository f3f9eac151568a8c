"""Calibrating the weights of a checkpoint with one block of the model in memory."""

import inspect
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...calibration.data import Data
from ...calibration.engine import float_weights
from ...calibration.engine.estimate import estimate
from ...calibration.engine.in_order import InOrder, of_weight
from ...calibration.engine.progress import Resumable, fingerprint
from ...calibration.with_data import progress_in, shared_data
from ...dtypes.joining import cut
from ...model.report import CalibrationEstimate, CalibrationReport
from ...model.targets import Refused, Target
from ...recipes.base import Calibrated, Recipe
from .. import part_file, sources
from ..stacked_experts import FusedSource, fuse_experts
from ..tensor_file import places_of
from .assignment import check_values, meta_model
from .partial import identity_of


class CalibratedWeights:
    """The weights of a checkpoint that are calibrated, all with the same data; they are made when the first one is
    asked for. They are kept in ``.<name of dst>.calibration`` until `remove`, where a process that was killed is
    continued."""

    def __init__(
        self, source: sources.Source, targets: Mapping[str, Target[Recipe]], dst: Path, model: nn.Module | None
    ) -> None:
        self.source, self.targets, self.model = source, targets, model
        self.folder = dst.absolute().with_name(f".{dst.name}.calibration")
        self.data = shared_data(list(targets.values()))
        self._progress: Resumable[Calibrated] | None = None
        # Stored name -> name in the model, row and column of its matrix among those of fused experts.
        self._places: dict[str, tuple[str, tuple[int, int] | None]] = {}

    def weight(self, name: str) -> tuple[Tensor, CalibrationReport]:
        """The new weight of this stored name."""
        if self._progress is None:
            self._progress = self._opened()
        progress = self._progress
        return progress.run(lambda: self._made(progress, name))

    def close(self) -> None:
        """Release the folder."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def remove(self) -> None:
        """Remove the folder, when the checkpoint is complete."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def estimate(self) -> CalibrationEstimate:
        """The memory and the time that making them will take; nothing is written."""
        with self._streamed() as (model, targets, data, weights):
            return estimate(model, targets, data, weights)

    def _opened(self) -> Resumable[Calibrated]:
        model, source = self._model()
        self._in_model(source, model)
        self.data = replace(self.data, batches=self.data.checked())
        identity = fingerprint([source.format, identity_of(self.source.path)])
        return progress_in(self.folder, list(self.targets.values()), self.data, identity, anew=True)

    def _made(self, progress: Resumable[Calibrated], name: str) -> tuple[Tensor, CalibrationReport]:
        if not progress.complete:
            with (
                self._streamed() as (model, targets, data, weights),
                InOrder(model, targets, data, progress, weights) as run,
            ):
                for target, statistics in run:
                    weight = target.parameter.detach()
                    recipe = check_values(target.slot.name, target, weight)
                    run.install(target, recipe.make_in_order(target, weight, statistics))
        of_model, place = self._places[name]
        made = progress.made(of_model)
        weight = made.weight
        if place is not None:
            columns = [at[1] for name, at in self._places.values() if name == of_model and at is not None]
            try:
                weight = cut(weight, 1 + max(columns))[place[0]][place[1]]
            except (IndexError, ValueError) as error:
                raise part_file.Damaged(f"what was made of {of_model} has no part {name}: {error}") from error
        return of_weight({name: (weight, made.report)}, name, self.targets[name].parameter)

    def _model(self) -> tuple[nn.Module, sources.Source]:
        """The model on the meta device, and the checkpoint with experts fused as they are there."""
        root = self.source.path if self.source.path.is_dir() else self.source.path.parent
        model = meta_model(root) if self.model is None else self.model
        return model, fuse_experts(self.source, [name for name, _ in places_of(model)])

    def _in_model(self, source: sources.Source, model: nn.Module) -> dict[str, Target[Recipe]]:
        """The target of each parameter of the model that is calibrated, by its first name there."""
        first: dict[int, str] = {}
        firsts = {name: first.setdefault(id(tensor), name) for name, (_, _, tensor) in places_of(model)}
        fused: Mapping[str, Any] = source.fused if isinstance(source, FusedSource) else {}
        renamed: Mapping[str, str] = source.renamed if isinstance(source, FusedSource) else {}
        for name, rows in fused.items():
            for row, parts in enumerate(rows):
                for column, part in enumerate(parts):
                    self._places[part] = name, (row, column)
        self._places |= {stored: (name, None) for name, stored in renamed.items()}
        found: dict[str, Target[Recipe]] = {}
        for stored, target in self.targets.items():
            name, _ = self._places.setdefault(stored, (firsts.get(stored, stored), None))
            if found.setdefault(name, target).recipe != target.recipe:
                raise Refused(f"the experts in {name} of the model take one recipe")
        for name in found.keys() & fused.keys():
            missing = [part for parts in fused[name] for part in parts if part not in self.targets]
            if missing:
                raise Refused(f"{missing[0]} is one of the experts in {name} and has no recipe")
        return found

    @contextmanager
    def _streamed(self) -> Iterator[tuple[nn.Module, list[Target[Recipe]], Data, float_weights.Streamed]]:
        """The model, its parameters that are calibrated, the data, and the weights, read when a block runs."""
        model, source = self._model()
        recipes = self._in_model(source, model)
        data = _without_logits(model, self.data, recipes)

        def stored(name: str) -> bool:
            return name in source.names

        def read(name: str) -> Tensor:
            tensor = source.tensor(source.aliases.get(name, name))
            return tensor.dequantize() if hasattr(tensor, "scheme") else tensor

        with float_weights.Streamed(model, read, stored) as weights:
            places: dict[int, list[tuple[nn.Module, str]]] = {}
            for _, (module, attribute, tensor) in places_of(model):
                places.setdefault(id(tensor), []).append((module, attribute))
            parameters = dict(model.named_parameters())
            if unknown := sorted(recipes.keys() - parameters.keys()):
                raise Refused(f"the model has no parameter {', '.join(unknown[:4])}")
            targets = []
            for name, target in recipes.items():
                parent, parameter = name.rpartition(".")[0], parameters[name]
                at = partial(replace, target.slot, module_name=parent, parameter=parameter)
                slots = [at(module=module, attribute=attribute) for module, attribute in places[id(parameter)]]
                targets.append(Target(slots))
            yield model, targets, data, weights


def _without_logits(model: Any, data: Data, recipes: Mapping[str, Any]) -> Data:
    """Data whose batches give the logits of one token, where the head is not calibrated: those of all take memory."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    names = {name for name, module in model.named_modules() if module is head}
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    if data.forward is not None or head is None or not takes or any(f"{name}.weight" in recipes for name in names):
        return data

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(**batch, logits_to_keep=1) if isinstance(batch, Mapping) else model(batch, logits_to_keep=1)

    return replace(data, forward=forward)
