"""Trace: one run of a model that finds its blocks, and in which order its weights are used.

A block is a module that a forward calls once, such as a layer of a transformer: the blocks of a model are the members
of its outermost lists of modules. What follows the last block, or stands before the first, belongs to no block.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..captures import Use, UseRecorder

CONTAINERS = (nn.ModuleList, nn.Sequential)
"""In the order in which they are searched for blocks."""


@dataclass
class Stage:
    """Weights that are quantized together, because they have the same inputs: each is used once in a forward, as a
    whole (`once`); of one weight, whether its output is added to a residual (`adds`)."""

    weights: list[Tensor]
    once: bool = True
    adds: bool = False


@dataclass
class Unit:
    """A part of the model that is calibrated at a time: a block, or what is outside of the blocks (None)."""

    block: nn.Module | None
    stages: list[Stage] = field(default_factory=list)


@torch.no_grad()
def trace(
    model: nn.Module, run: Callable[[], Any], weights: Sequence[Tensor], transposed: Container[int] = ()
) -> list[Unit]:
    """The units of a model in the order in which `run`, on one batch, runs them."""
    calls = _Calls(model)
    uses: list[tuple[int, Use]] = []
    added: list[int] = []
    recorder = UseRecorder(
        weights, lambda use: uses.append((calls.count, use)), lambda weight, _: added.append(id(weight)), transposed
    )
    with calls, recorder:
        run()
    blocks = _find_blocks(model, calls, weights)
    first = min((calls.begun[block][0] for block in blocks), default=calls.count + 1)
    early = {id(use.weight) for at, use in uses if at < first}  # they are used before the first block runs
    holder = {id(parameter): block for block in blocks for parameter in block.parameters()}
    before = [weight for weight in weights if id(weight) not in holder and id(weight) in early]
    after = [weight for weight in weights if id(weight) not in holder and id(weight) not in early]
    parts = [(block, [weight for weight in weights if holder.get(id(weight)) is block]) for block in blocks]
    used = [use for _, use in uses]
    units = [Unit(block, _stages(mine, used)) for block, mine in [(None, before), *parts, (None, after)]]
    for stage in (stage for unit in units for stage in unit.stages):
        stage.adds = stage.once and len(stage.weights) == 1 and added.count(id(stage.weights[0])) == 1
    return [unit for unit in units if unit.stages or unit.block is not None]


def _stages(weights: Sequence[Tensor], uses: Iterable[Use]) -> list[Stage]:
    """Stages of these weights in the order of their first use; weights that were not used are the last stage."""
    of_interest = {id(weight) for weight in weights}
    stages: dict[int, Stage] = {}
    of_weight: dict[int, Stage] = {}
    for use in uses:
        key = id(use.weight)
        if key not in of_interest:
            continue
        if key in of_weight:
            of_weight[key].once = False
            continue
        alone = use.expert is not None
        stage = stages.setdefault(key if alone else id(use.input), Stage([]))
        stage.weights.append(use.weight)
        stage.once = stage.once and not alone
        of_weight[key] = stage
    unused = [weight for weight in weights if id(weight) not in of_weight]
    return [*stages.values(), *([Stage(unused, False)] if unused else [])]


class _Calls:
    """When each module was called, as a context manager."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.count = model, 0
        self.begun: dict[nn.Module, list[int]] = {}

    def __enter__(self) -> "_Calls":
        self.handles = [module.register_forward_pre_hook(self._called) for module in self.model.modules()]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _called(self, module: nn.Module, args: Any) -> None:
        self.count += 1
        self.begun.setdefault(module, []).append(self.count)


def _find_blocks(model: nn.Module, calls: _Calls, weights: Sequence[Tensor]) -> list[nn.Module]:
    """The members of the outermost containers whose members are all called once and hold weights. A weight that is also
    used elsewhere, such as a shared layer, keeps its container from being blocks."""
    of_interest = {id(weight) for weight in weights}
    for kind in CONTAINERS:
        found: list[nn.Module] = []
        for container in _outermost(model, kind, calls):
            found += [member for member in container if any(id(p) in of_interest for p in member.parameters())]
        holders = Counter(key for block in found for key in {id(p) for p in block.parameters()} & of_interest)
        if len(found) >= 2 and all(count == 1 for count in holders.values()):
            return sorted(found, key=lambda block: calls.begun[block][0])
    return []


def candidates(model: nn.Module) -> list[nn.Module]:
    """The modules that are blocks if a run shows that each of them is called once."""
    for kind in CONTAINERS:
        if found := [member for container in _outermost(model, kind) for member in container]:
            return found
    return []


def _outermost(module: nn.Module, kind: type[nn.Module], calls: _Calls | None = None) -> list[Any]:
    found: list[Any] = []
    for child in module.children():
        members = list(child.children())
        fits = calls is None or all(len(calls.begun.get(member, ())) == 1 for member in members)
        if isinstance(child, kind) and len(members) >= 2 and fits:
            found.append(child)
        else:
            found += _outermost(child, kind, calls)
    return found


# Routing: which tokens the experts of a mixture see while the statistics of their inputs are collected.
#
# The experts of a layer in one module, as transformers has them, are called with tokens (T, H), the experts of each
# token, (T, R) integers, and the weights of their outputs, (T, R). While statistics are collected, the float model
# sends each token to the experts to which the quantized one has sent it: so the inputs of an expert in the two are
# pairs. If `every`, each expert also gets all tokens, whose statistics are kept apart (`Sum.blend`).


class Routing:
    """The routing of one batch, in the modules of `block` that hold some of these weights (E, N, K)."""

    def __init__(self, block: nn.Module, weights: Sequence[Tensor], every: bool) -> None:
        experts = {id(weight): len(weight) for weight in weights if weight.dim() == 3}
        self.experts = {
            module: experts[id(parameter)]
            for module in block.modules()
            for parameter in module._parameters.values()
            if id(parameter) in experts
        }
        self.every = every
        self.all_tokens = False
        self.chosen: dict[tuple[nn.Module, int], Tensor] = {}

    def forwards(self) -> dict[nn.Module, Callable[..., Any]]:
        """What to call in place of the forward of each module: in the first run the choices are kept, and followed in
        others. `all_tokens` is true during calls in which an expert gets all tokens."""
        return {module: self._forward(module) for module in self.experts}

    def _forward(self, module: nn.Module) -> Callable[..., Any]:
        forward, calls = module.forward, itertools.count()

        def routed(*args: Any, **kwargs: Any) -> Any:
            if kwargs or not _are_routed(args):
                return forward(*args, **kwargs)
            hidden, index, weights = args
            kept = self.chosen.setdefault((module, next(calls)), index)
            if self.every:
                self.all_tokens = True
                for expert in range(self.experts[module]):
                    forward(hidden, torch.full_like(index[:, :1], expert), torch.ones_like(weights[:, :1]))
                self.all_tokens = False
            return forward(hidden, kept if kept.shape == index.shape else index, weights)

        return routed


def _are_routed(args: tuple[Any, ...]) -> bool:
    """Whether these are tokens (T, H), their experts (T, R) and weights (T, R)."""
    if len(args) != 3 or not all(isinstance(arg, Tensor) and arg.dim() == 2 for arg in args):
        return False
    hidden, index, weights = args
    return index.shape == weights.shape and len(index) == len(hidden) and not index.is_floating_point()
