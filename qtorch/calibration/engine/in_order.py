"""The weights of a model in the order in which they run, each with the statistics of the inputs that it will meet.

    with InOrder(model, targets, data) as run:
        for target, statistics in run:
            run.install(target, made_of(target, statistics))

The inputs come from the model with all that was installed so far, beside those of the float model where statistics are
`paired`. Memory holds the inputs of one block, not of all: see `streams`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...checkpoint.part_file import Damaged
from ...model.targets import Target
from ..captures import Key, Use, UseRecorder, without_padding
from ..data import Data, StopForward, eval_mode, tensors_of
from ..statistics import NoInputs, Statistic, Statistics, Sum
from .float_weights import Weights
from .progress import Progress
from .streams import Calls, Stream, needed_outputs, replaced_forwards
from .trace import Routing, Stage, Unit, trace

M = TypeVar("M", bound="tuple[Any, ...]")

Step = tuple[Target[Any], "Statistics | dict[int, Statistics]"]
"""A weight, and the statistics of its inputs, or of those of each of its experts."""


@dataclass
class StageInputs:
    """The rows that the weights of a stage meet in one batch, for experts also those of all tokens, and the residual
    that the output is added to."""

    rows: dict[Key, list[Tensor]] = field(default_factory=dict)
    all_tokens: dict[Key, list[Tensor]] = field(default_factory=dict)
    residual: Tensor | None = None


@dataclass(eq=False)
class BlockRun:
    """A block with quantized weights, run on the inputs that it has in the model as quantized so far. `output` gives
    that of a batch in the float model, `masks` the tokens that count, `names` those of the weights that can be replaced
    in the block, `batches` those that reach it."""

    block: nn.Module
    calls: Calls
    output: Callable[[int], Any]
    masks: Sequence[Tensor | None]
    names: Mapping[Tensor, Sequence[str]]
    batches: Sequence[int]

    def loss(self, index: int, weights: Mapping[Tensor, Tensor]) -> Tensor:
        """The mean square of the error of the output of one of `batches`, relative to that of the float output."""
        batch = self.batches[index]
        named = {name: tensor for weight, tensor in weights.items() for name in self.names[weight]}
        # A block may write into its inputs.
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tuple(self.calls(batch) or ()))
        output = torch.func.functional_call(self.block, named, args, kwargs)
        found, wanted = (next(iter(tensors_of(of)), None) for of in (output, self.output(batch)))
        if found is None or wanted is None:
            raise TypeError(f"a block returned no tensor in floating point, got {type(output).__name__}")
        if found.shape != wanted.shape:
            return found.float().sum() * 0  # an expert to which the float model sends other tokens
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


def of_weight(made: Mapping[str, M], name: str, weight: Tensor) -> M:
    """What was made of a weight."""
    if name not in made or made[name][0].shape != weight.shape:
        raise Damaged(f"what was made of {name} is missing, or of another shape")
    return made[name]


class InOrder(Generic[M]):
    """One pass over the weights of a model; a context manager, after which the model has its float weights again.

    What is `made` of each float parameter, a tuple whose first item is the tensor, and the outputs of blocks are kept
    with `progress`. Streamed `weights` of blocks that are done are with `progress` only.
    """

    def __init__(
        self, model: nn.Module, targets: Sequence[Target[Any]], data: Data, progress: Progress[M] | None = None,
        weights: Weights | None = None,
    ) -> None:  # fmt: skip
        self.model, self.data, self.batches = model, data, data.checked()
        self.targets = {id(target.parameter): target for target in targets}
        self._floats = [(target, target.parameter) for target in targets]
        self.recipes: dict[int, Any] = {id(target.parameter): target.recipe for target in targets}
        self.learns = any(recipe.learner is not None for recipe in self.recipes.values())
        self.paired = self.learns or any(kind.paired for of in self.recipes.values() for kind in of.statistics)
        self.transposed = {id(target.parameter) for target in targets if target.kind.is_transposed}
        self.made: dict[Tensor, M] = {}
        self.progress: Progress[M] = progress or Progress()
        self.weights = weights or Weights()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._summed_across: set[int] = set()

    def __enter__(self) -> "InOrder[M]":
        self._stack = ExitStack()
        self._stack.enter_context(torch.no_grad())
        self._stack.enter_context(eval_mode(self.model))
        self._stack.enter_context(installed(self._floats))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Step]:
        """Each weight with its statistics; it is to be installed before the next one is taken."""
        steps = self._steps()
        self._stack.callback(steps.close)  # after an error its blocks are let go before the model is restored
        return steps

    def _steps(self) -> Generator[Step, None, None]:
        units = self.units()
        found = [unit.block for unit in units if unit.block is not None]
        keep = needed_outputs(self.model, self.forward, found)
        stores = map(self.progress.stream, ("quantized", "float"))
        streams = [Stream(self.forward, found, len(self.batches), keep, store) for store in stores]
        self.quantized, self.of_float = streams
        for index, unit in enumerate(units):
            stays = self.weights.stay or unit.block is None
            weights = [weight for stage in unit.stages for weight in stage.weights]
            names = {self.names[id(weight)]: self.targets[id(weight)] for weight in weights}
            if index < self.progress.done:
                made = self.progress.load(index) if stays else {}
                if unit.block is not None:
                    for stream in streams if self.paired else streams[:1]:
                        stream.skip(unit.block)
            else:
                with self.weights.loaded(unit.block):
                    yield from self._calibrate(unit)
                made = {name: self.made.pop(target.parameter) for name, target in names.items()}
                made = self.progress.finish(index, len(units), made)
                for stream in streams:
                    stream.forget()
            for name, target in names.items():
                if stays:
                    self.install(target, of_weight(made, name, target.parameter))
                else:
                    put(target, target.parameter)
        for stream in streams:
            stream.clear()

    def units(self) -> list[Unit]:
        """The parts of the model in the order in which they run."""
        weights = [target.parameter for target in self.targets.values()]
        return trace(self.model, lambda: self.forward(0), weights, self.transposed)

    def forward(self, batch: int) -> Any:
        """Run the model on a batch."""
        return self.data.call(self.model, self.batches[batch])

    def _calibrate(self, unit: Unit) -> Iterator[Step]:
        block = unit.block
        calls = None if block is None else self.quantized.calls(block)
        of_float = None
        if block is not None and self.paired:
            with installed(self._floats):
                of_float = self.of_float.calls(block)
        for stage in unit.stages:
            found = self.statistics(stage, block, calls, of_float)
            for weight in stage.weights:
                yield self.targets[id(weight)], self.of_matrices(found, weight)
        if block is not None and calls is not None:
            if of_float is not None:
                with installed(self._floats):
                    self.of_float.finish(block, of_float)
            if self.learns:
                self._learn(block, calls)
            self.quantized.finish(block, calls)

    def _learn(self, block: nn.Module, calls: Calls) -> None:
        """Improve the weights of a block, which are all installed, against its outputs in the float model."""
        current = {
            id(slot.module._parameters[slot.attribute]): target
            for target in self.targets.values()
            for slot in target.slots
            if target.parameter in self.made
        }
        names: dict[Tensor, list[str]] = {}
        for name, parameter in block.named_parameters(remove_duplicate=False):
            if id(parameter) in current:
                names.setdefault(current[id(parameter)].parameter, []).append(name)
        masks = [self.data.mask_of(batch) for batch in self.batches]
        index = self.of_float.blocks.index(block)
        missed = self.quantized.missed | self.of_float.missed
        reach = [batch for batch in range(len(masks)) if (block, batch) not in missed]
        run = BlockRun(block, calls, partial(self.of_float.store.read, index), masks, names, reach)
        learners: dict[BlockLearner, dict[Tensor, M]] = {}
        for weight in names:
            if (learner := self.recipes[id(weight)].learner) is not None:
                learners.setdefault(learner, {})[weight] = self.made[weight]
        for learner, mine in learners.items() if reach else ():
            for weight, made in learner.learn_block(run, mine).items():
                self.install(self.targets[id(weight)], made)

    def statistics(
        self, stage: Stage, block: nn.Module | None, calls: Calls | None, of_float: Calls | None
    ) -> dict[Key, Statistics]:
        """The statistics of the weights of a stage, over all batches; weights with one input share them."""
        kinds = dict.fromkeys(kind for weight in stage.weights for kind in self.recipes[id(weight)].statistics)
        if not kinds:
            return {}
        first = id(stage.weights[0])
        found: dict[Key, Statistics] = {}
        common: dict[tuple[int, type[Statistic]], Statistic] = {}
        every: dict[int, Statistic] = {}
        all_experts = any(getattr(self.recipes[id(weight)], "all_experts", False) for weight in stage.weights)
        for batch in range(len(self.batches)):
            routing = Routing(self.model if block is None else block, stage.weights, all_experts)
            seen, pair = self._inputs(stage, self.quantized, block, calls, batch, routing), StageInputs()
            if of_float is not None or (self.paired and block is None):
                with installed(self._floats):
                    pair = self._inputs(stage, self.of_float, block, of_float, batch, routing)
            lacks = None if seen.residual is None or pair.residual is None else pair.residual - seen.residual
            for key in seen.rows:
                if stage.once and key[0] != first:
                    continue
                if key not in found:
                    found[key] = {k: k() if k.per_expert else common.setdefault((key[0], k), k()) for k in kinds}
                    every |= {id(statistic): statistic for statistic in found[key].values()}
                add_batch(found[key], key, seen, pair, lacks)
            for statistic in every.values():
                statistic.end_batch()
        for statistic in every.values():
            statistic.close()
        if stage.once:
            shared = found.get((first, None), {})
            return {(id(weight), None): shared for weight in stage.weights if shared}
        return found

    def _inputs(
        self, stage: Stage, stream: Stream, block: nn.Module | None, calls: Calls | None, batch: int, routing: Routing
    ) -> StageInputs:
        """The inputs of the weights of a stage in one batch."""
        found = StageInputs()
        left = {id(weight) for weight in stage.weights}
        mask = self.data.mask_of(self.batches[batch])
        follows = stage.adds and self.paired

        def seen(use: Use) -> None:
            if use.transposed:
                self._summed_across.add(id(use.weight))
                return
            if not stage.once or use.weight is stage.weights[0]:
                into = found.all_tokens if routing.all_tokens else found.rows
                into.setdefault(use.key, []).extend(part.clone() for part in use.unpadded(mask))
            left.discard(id(use.weight))
            if stage.once and not left and not follows:
                raise StopForward

        def added(weight: Tensor, residual: Tensor) -> None:
            found.residual = without_padding(residual.detach().reshape(-1, residual.shape[-1]), mask).clone()
            raise StopForward

        recorder = UseRecorder(stage.weights, seen, added if follows else None, self.transposed)
        with replaced_forwards(routing.forwards()), recorder:
            try:
                if block is None or calls is None:
                    stream.run_rest(batch)
                elif (call := calls(batch)) is not None:
                    block(*call.args, **call.kwargs)
            except StopForward:
                pass
        return found

    def of_matrices(self, found: Mapping[Key, Statistics], weight: Tensor) -> Statistics | dict[int, Statistics]:
        """The statistics of a weight, or of each of its experts that got inputs."""
        experts = {key[1]: value for key, value in found.items() if key[0] == id(weight) and key[1] is not None}
        if experts:
            return experts
        if of_whole := found.get((id(weight), None)):
            return of_whole
        reason = "no product of the data with it was seen"
        if id(weight) in self._summed_across:
            reason = "products sum over another axis than that along which it is quantized (see register_weight_kind)"
        none: Statistics = {NoInputs: NoInputs(reason)}
        return none

    def install(self, target: Target[Any], made: M) -> None:
        """Let the model run with what was made of a weight."""
        self.made[target.parameter] = made
        put(target, nn.Parameter(made[0], False))


def add_batch(statistics: Statistics, key: Key, seen: StageInputs, of_float: StageInputs, lacks: Tensor | None) -> None:
    """Add what a weight meets in one batch, beside what it meets in the float model; `lacks` is what the residual
    stream lacks of that one's."""
    parts = seen.rows[key]
    for statistic in statistics.values():
        for rows, of_pair in paired(parts, of_float.rows.get(key, [])):
            statistic.update_pair(rows, of_pair)
        if isinstance(statistic, Sum):
            for rows, of_pair in paired(seen.all_tokens.get(key, []), of_float.all_tokens.get(key, [])):
                statistic.blend(rows, of_pair)
        if lacks is not None and len(lacks) == len(parts[0]):
            statistic.update_residual(parts[0], lacks)


def paired(parts: Sequence[Tensor], of_float: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Inputs with those of the float model for the same tokens. Where an expert got other tokens there, as routers that
    `Routing` does not know may send them, inputs stand for their own float ones: half of them would be wrong pairs."""
    if [part.shape for part in parts] != [part.shape for part in of_float]:
        of_float = parts
    return [(a, b if (a - b).square().sum() < a.square().sum() else a) for a, b in zip(parts, of_float, strict=True)]


def put(target: Target[Any], parameter: nn.Parameter | None) -> None:
    """Put a parameter in all places of a weight."""
    for slot in target.slots:
        slot.module._parameters[slot.attribute] = parameter


@contextmanager
def installed(parameters: Sequence[tuple[Target[Any], nn.Parameter]]) -> Iterator[None]:
    """With these parameters in place of weights; then with those that were there."""
    now = [(target, target.slot.module._parameters[target.slot.attribute]) for target, _ in parameters]
    try:
        for target, parameter in parameters:
            put(target, parameter)
        yield
    finally:
        for target, before in now:
            put(target, before)
