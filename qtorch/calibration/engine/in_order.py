"""Quantize the weights of a model in the order in which they run, each with the inputs that it will meet.

The inputs come from the model as quantized so far, beside those of the float model where they are asked for. Memory
holds the inputs of one block, not of all: see `streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map

from ...checkpoint.part_file import Damaged
from ..captures import Key, Use, UseRecorder, without_padding
from ..data import Data, eval_mode
from ..statistics import Missed, Statistic, Statistics
from .float_weights import Weights
from .progress import Progress
from .streams import Call, StopForward, Stream, needed_outputs
from .trace import Stage, Unit, trace

# --------------------------------------------------------------------------------------------------
# Rows: what the weights of a stage meet in one batch, and how statistics are updated by it.


@dataclass
class Seen:
    """The rows that the weights of a stage have met in one batch, and the residual that the output is added to."""

    rows: dict[Key, list[Tensor]] = field(default_factory=dict)
    residual: Tensor | None = None


def update(statistics: Statistics, parts: list[Tensor], of_float: list[Tensor]) -> None:
    """Add the rows of one batch, in pairs with those of the float model where both streams have the same."""
    matches = [a.shape for a in parts] == [b.shape for b in of_float]
    for statistic in statistics.values():
        for index, rows in enumerate(parts):
            if statistic.paired and matches:
                statistic.update_pair(rows, of_float[index])  # type: ignore[attr-defined]
            else:
                statistic.update(rows)


def update_residual(statistics: Statistics, rows: Tensor, error: Tensor) -> None:
    """Add what the residual stream lacks, for the rows of one batch."""
    for statistic in statistics.values():
        if statistic.paired and len(rows) == len(error):
            statistic.update_residual(rows, error)  # type: ignore[attr-defined]


def each_of(found: Mapping[Key, Statistics]) -> list[Statistic]:
    """All statistics, those that weights share once."""
    return list({id(statistic): statistic for of_weight in found.values() for statistic in of_weight.values()}.values())


# --------------------------------------------------------------------------------------------------
# BlockRun: a block run with other tensors as weights, on the inputs that it has in the quantized model.


class BlockRun:
    """A block on all batches.

    Args:
        block: with quantized weights in place.
        calls: its arguments in the model as quantized so far, of each batch.
        output: batch -> its output in the float model.
        masks: tokens that count, of each batch; None if all do.
        names: weight that can be replaced -> its names in the block.
    """

    def __init__(
        self,
        block: nn.Module,
        calls: Sequence[Call],
        output: Callable[[int], Any],
        masks: Sequence[Tensor | None],
        names: Mapping[Tensor, Sequence[str]],
    ) -> None:
        self.block, self.calls, self.output, self.masks, self.names = block, calls, output, masks, names
        self.count = len(calls)

    def loss(self, batch: int, weights: Mapping[Tensor, Tensor]) -> Tensor:
        """The mean square of the error of the output of one batch, relative to that of the float output.

        Args:
            weights: what replaces the weights of `names`.
        """
        named = {name: tensor for weight, tensor in weights.items() for name in self.names[weight]}
        # A block may write into its inputs.
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tuple(self.calls[batch]))
        output = functional_call(self.block, named, args, kwargs)
        found, wanted = _first(output), _first(self.output(batch))
        error = (found - wanted).float()
        mask = self.masks[batch]
        if mask is not None and tuple(error.shape[: mask.dim()]) == tuple(mask.shape):
            error, wanted = error[mask.to(error.device)], wanted[mask.to(error.device)]
        return error.square().sum() / wanted.float().square().sum()


class BlockLearner(Protocol):
    """What improves the weights of a block together, once all of them are quantized."""

    def learn_block(self, run: BlockRun, made: Mapping[Tensor, Any]) -> Mapping[Tensor, Any]:
        """Better ones of what was `made` for float weights, if there are any."""
        ...


def _first(output: Any) -> Tensor:
    """The first tensor of what a block returns, its hidden states."""
    for value in tree_flatten(output)[0]:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError(f"a block returned no tensor in floating point, got {type(output).__name__}")


def weight_names(block: nn.Module, weights: Mapping[int, Tensor]) -> dict[Tensor, list[str]]:
    """The names in `block` of the parameters that stand for `weights`, which are given by the ids of the parameters."""
    found: dict[Tensor, list[str]] = {}
    for name, parameter in block.named_parameters(remove_duplicate=False):
        weight = weights.get(id(parameter))
        if weight is not None:
            found.setdefault(weight, []).append(name)
    return found


M = TypeVar("M", bound="tuple[Any, ...]")

Slots = Sequence[tuple[nn.Module, str]]


@dataclass
class Wanted(Generic[M]):
    """A weight to be quantized.

    Attributes:
        weight: the float parameter.
        slots: the (module, attribute) that hold it.
        statistics: what `make` takes.
        make: (statistics of the whole weight, or of each expert) -> the quantized weight, and anything beside it.
        learner: improves the weights of a block that have an equal one.
        transposed: whether it is stored as (K, N).
    """

    weight: nn.Parameter
    slots: Slots
    statistics: Sequence[type[Statistic]]
    make: Callable[[Statistics | dict[int, Statistics]], M]
    learner: BlockLearner | None = None
    transposed: bool = False


@torch.no_grad()
def quantize_in_order(
    model: nn.Module,
    wanted: Sequence[Wanted[M]],
    data: Data,
    blocks: Sequence[nn.Module] | None = None,
    progress: Progress[M] | None = None,
    weights: Weights | None = None,
) -> dict[Tensor, M]:
    """What `make` returns for each weight, by float parameter; the model is unchanged in the end.

    Args:
        blocks: the blocks; by default they are found.
        progress: what an earlier call has done already, and where this one keeps what it does.
        weights: where the float weights are, by default in memory. If they are streamed, what is made of the weights of
            blocks is with `progress` only.

    Raises:
        ValueError: there is no batch.
    """
    kept = progress or Progress()
    return kept.run(lambda: InOrder(model, wanted, data, kept, weights or Weights()).run(blocks))


def of_weight(made: Mapping[str, M], name: str, weight: Tensor) -> M:
    """What was made of a weight.

    Raises:
        Damaged: there is nothing, or it is not of this weight.
    """
    if name not in made or made[name][0].shape != weight.shape:
        raise Damaged(f"what was made of {name} is missing, or of another shape")
    return made[name]


class InOrder(Generic[M]):
    """One run of `quantize_in_order`."""

    def __init__(
        self, model: nn.Module, wanted: Sequence[Wanted[M]], data: Data, progress: Progress[M], weights: Weights
    ) -> None:
        self.model = model
        self.wanted = {id(item.weight): item for item in wanted}
        self.data = data
        self.learns = any(item.learner is not None for item in wanted)
        self.paired = self.learns or any(kind.paired for item in wanted for kind in item.statistics)
        self.made: dict[Tensor, M] = {}
        self.transposed = {id(item.weight) for item in wanted if item.transposed}
        self.across: set[int] = set()
        self.progress = progress
        self.weights = weights
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}

    def run(self, blocks: Sequence[nn.Module] | None) -> dict[Tensor, M]:
        with eval_mode(self.model), self.restored():
            self.batches = self.data.checked()
            weights = [item.weight for item in self.wanted.values()]
            units = trace(self.model, lambda: self.forward(0), weights, blocks, self.transposed)
            found = [unit.block for unit in units if unit.block is not None]
            keep = needed_outputs(self.model, self.forward, found)
            count = len(self.batches)
            streams = [
                Stream(self.forward, found, count, keep, self.progress.stream(n)) for n in ("quantized", "float")
            ]
            self.quantized, self.of_float = streams
            for index, unit in enumerate(units):
                stays = self.weights.stay or unit.block is None
                if index < self.progress.done:
                    self._take_over(unit, self.progress.load(index) if stays else None)
                    continue
                with self.weights.loaded(unit.block):
                    self._calibrate(unit)
                self._finish(index, len(units), unit, stays)
                for stream in streams:
                    stream.forget()
            for stream in streams:
                stream.clear()
        return self.made

    def _finish(self, index: int, count: int, unit: Unit, stays: bool) -> None:
        """Hand over what was made in a unit, and let the model run with it, or let it go."""
        names = {self.names[id(weight)]: weight for stage in unit.stages for weight in stage.weights}
        made = {name: self.made.pop(weight) for name, weight in names.items()}
        made = dict(self.progress.finish(index, count, made))
        for name, weight in names.items():
            if stays:
                self._install(weight, made[name])
                continue
            for module, attribute in self.wanted[id(weight)].slots:
                module._parameters[attribute] = self.wanted[id(weight)].weight

    def _take_over(self, unit: Unit, made: Mapping[str, M] | None) -> None:
        """A unit that an earlier call has done."""
        for weight in [] if made is None else [weight for stage in unit.stages for weight in stage.weights]:
            assert made is not None
            self._install(weight, of_weight(made, self.names[id(weight)], weight))
        if unit.block is not None:
            self.quantized.skip(unit.block)
            if self.paired:
                self.of_float.skip(unit.block)

    def forward(self, batch: int) -> Any:
        """Run the model on a batch."""
        return self.data.call(self.model, self.batches[batch])

    def _calibrate(self, unit: Unit) -> None:
        block = unit.block
        if block is None:
            calls, of_float = None, None
        else:
            calls = self.quantized.calls(block)
            with self._floats():
                of_float = self.of_float.calls(block) if self.paired else None
        for stage in unit.stages:
            self._quantize(stage, self.statistics(stage, block, calls, of_float))
        if block is not None and calls is not None:
            if of_float is not None:
                with self._floats():
                    self.of_float.finish(block, of_float)
            if self.learns:
                self._learn(block, calls)
            self.quantized.finish(block, calls)

    def _learn(self, block: nn.Module, calls: Sequence[Call]) -> None:
        """Improve the weights of a block, whose stages are done, against its outputs in the float model."""
        current = {id(module._parameters[name]): item for item in self.wanted.values() for module, name in item.slots}
        names = weight_names(block, {key: item.weight for key, item in current.items() if item.weight in self.made})
        masks = [self.data.mask_of(batch) for batch in self.batches]
        index = self.of_float.blocks.index(block)
        run = BlockRun(block, calls, partial(self.of_float.kept.read, index), masks, names)
        learners: list[BlockLearner] = []
        for weight in names:
            learner = self.wanted[id(weight)].learner
            if learner is not None and learner not in learners:
                learners.append(learner)
        for learner in learners:
            mine = {weight: self.made[weight] for weight in names if self.wanted[id(weight)].learner == learner}
            for weight, made in learner.learn_block(run, mine).items():
                self._install(weight, made)

    def statistics(
        self, stage: Stage, block: nn.Module | None, calls: Sequence[Call] | None, of_float: Sequence[Call] | None
    ) -> dict[Key, Statistics]:
        """The statistics of the weights of a stage, over all batches."""
        kinds = dict.fromkeys(kind for weight in stage.weights for kind in self.wanted[id(weight)].statistics)
        if not kinds:
            return {}
        first = id(stage.weights[0])
        found: dict[Key, Statistics] = {}
        common: dict[tuple[int, type[Statistic]], Statistic] = {}
        for batch in range(len(self.batches)):
            seen, pair = self._rows(stage, self.quantized, block, calls, batch), Seen()
            if of_float is not None or (self.paired and block is None):
                with self._floats():
                    pair = self._rows(stage, self.of_float, block, of_float, batch)
            for key, parts in seen.rows.items():
                if stage.once and key[0] != first:
                    continue
                if key not in found:
                    found[key] = {
                        kind: kind() if kind.per_expert else common.setdefault((key[0], kind), kind()) for kind in kinds
                    }
                update(found[key], parts, pair.rows.get(key, []))
                if seen.residual is not None and pair.residual is not None:
                    update_residual(found[key], parts[0], pair.residual - seen.residual)
            for statistic in each_of(found):
                statistic.end_batch()
        for statistic in each_of(found):
            statistic.close()
        if stage.once:
            shared = found.get((first, None), {})
            return {(id(weight), None): shared for weight in stage.weights if shared}
        return found

    def _rows(
        self, stage: Stage, stream: Stream, block: nn.Module | None, calls: Sequence[Call] | None, batch: int
    ) -> Seen:
        """The inputs of the weights of a stage in one batch."""
        found = Seen()
        left = {id(weight) for weight in stage.weights}
        mask = self.data.mask_of(self.batches[batch])
        follows = stage.adds and self.paired

        def seen(use: Use) -> None:
            if use.transposed:
                self.across.add(id(use.weight))
                return
            key = use.key
            if not stage.once or key[0] == id(stage.weights[0]):
                found.rows.setdefault(key, []).extend(part.clone() for part in use.unpadded(mask))
            left.discard(id(use.weight))
            if stage.once and not left and not follows:
                raise StopForward

        def added(weight: Tensor, residual: Tensor) -> None:
            found.residual = without_padding(residual.detach().reshape(-1, residual.shape[-1]), mask).clone()
            raise StopForward

        with UseRecorder(stage.weights, seen, added if follows else None, self.transposed):
            try:
                if block is None or calls is None:
                    stream.run_rest(batch)
                else:
                    block(*calls[batch].args, **calls[batch].kwargs)
            except StopForward:
                pass
        return found

    def _quantize(self, stage: Stage, found: Mapping[Key, Statistics]) -> None:
        for weight in stage.weights:
            item = self.wanted[id(weight)]
            experts = {key[1]: value for key, value in found.items() if key[0] == id(weight) and key[1] is not None}
            of_whole: Statistics = found.get((id(weight), None)) or {Missed: Missed(self._why(weight))}
            self._install(weight, item.make(experts if experts else of_whole))

    def _why(self, weight: Tensor) -> str:
        """Why there are no statistics of a weight."""
        if id(weight) in self.across:
            return "products sum over another axis than the one along which it is quantized (see register_weight_kind)"
        return "no product of the data with it was seen"

    def _install(self, weight: Tensor, made: M) -> None:
        """Let the model run with what was made of a weight."""
        item = self.wanted[id(weight)]
        self.made[item.weight] = made
        parameter = nn.Parameter(made[0], False)
        for module, attribute in item.slots:
            module._parameters[attribute] = parameter

    @contextmanager
    def _floats(self) -> Iterator[None]:
        """With the float weights in place."""
        now = [
            (module, attribute, module._parameters[attribute])
            for item in self.wanted.values()
            for module, attribute in item.slots
        ]
        for item in self.wanted.values():
            for module, attribute in item.slots:
                module._parameters[attribute] = item.weight
        try:
            yield
        finally:
            for module, attribute, parameter in now:
                module._parameters[attribute] = parameter

    @contextmanager
    def restored(self) -> Iterator[None]:
        """With the float weights in place in the end."""
        try:
            yield
        finally:
            for item in self.wanted.values():
                for module, attribute in item.slots:
                    module._parameters[attribute] = item.weight
