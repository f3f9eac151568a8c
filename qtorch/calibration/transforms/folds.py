"""Folds: places of a model where the channels of a tensor can be scaled without a change of its outputs.

    norm(x) * t -> (W / t) norm(x) t         rows of W_1 times t, columns of W_2 divided by t

They are found in the graph of the model, from each parameter (see `propagation`); no model is known by name. The new
values are those of new parameters in all places of the old ones, which are not written to: `quantize_` puts the old
ones back after an error.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...model.install import Change, install, keep_attributes
from .propagation import ModelGraph, Propagation, axis_labels, factors, ids, shape_of
from .rules import rule_of


class Parameters:
    """The parameters of a model; a tied one has its first name."""

    def __init__(self, model: nn.Module) -> None:
        self.slots: dict[str, list[tuple[nn.Module, str]]] = {}
        first: dict[int, str] = {}
        for module_name, module in model.named_modules(remove_duplicate=True):
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    name = first.setdefault(id(parameter), f"{module_name}.{attribute}" if module_name else attribute)
                    self.slots.setdefault(name, []).append((module, attribute))

    def __getitem__(self, name: str) -> nn.Parameter:
        module, attribute = self.slots[name][0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter

    def replace(self, values: Mapping[str, Tensor]) -> None:
        """Replace parameters by new ones with these values, in the dtype of the old ones; all or none."""
        made = {}
        for name, value in values.items():
            old = self[name]
            made[name] = keep_attributes(nn.Parameter(value.to(old.dtype), old.requires_grad), old)
        self.put(made)

    def put(self, made: Mapping[str, nn.Parameter]) -> None:
        """Put parameters in place of those with these names; all or none."""
        places = [(place, parameter) for name, parameter in made.items() for place in self.slots[name]]
        install([Change(module._parameters, attribute, parameter) for (module, attribute), parameter in places])

    @contextmanager
    def replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """With parameters of these values, in the dtype of the values; then with the old ones again."""
        old = {name: self[name] for name in values}
        try:
            self.put({name: nn.Parameter(value, False) for name, value in values.items()})
            yield
        finally:
            self.put(old)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which new values of a parameter are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Fold:
    """Scales t_1 .. t_n that may be multiplied into some parameters and out of others; those that are not `free` have
    to be 1. `labels` say by which scale each element of a parameter is multiplied; the channels of `name` are. `shifts`
    has c where the model multiplies by (c + parameter)."""

    name: str
    scales: int
    free: Tensor
    labels: Mapping[str, Tensor]
    shifts: Mapping[str, float]

    @property
    def consumers(self) -> dict[str, Tensor]:
        """The parameters that are divided, with their labels."""
        return {name: labels for name, labels in self.labels.items() if bool((labels < 0).any())}

    def values(self, parameters: Parameters, scales: Tensor) -> dict[str, Tensor]:
        """The new values of the parameters for positive scales (n,), in fp32 (fp64 for those in fp64)."""
        made = {}
        for name, labels in self.labels.items():
            old = parameters[name].detach()
            dtype, shift = computing_dtype(old.dtype), self.shifts.get(name, 0.0)
            by = factors(labels, torch.where(self.free, scales.cpu().to(dtype), 1)).to(old.device)
            made[name] = (old.to(dtype) + shift) * by - shift
        return made


@dataclass(frozen=True)
class Refusal:
    """A parameter whose channels cannot be scaled, and why."""

    name: str
    reason: str
    consumers: tuple[str, ...]


def find_folds(graph: ModelGraph) -> tuple[list[Fold], list[Refusal]]:
    """All folds of a model, in the order of the model; and the parameters that feed linear layers but have none."""
    folds, refusals = [], []
    for name, nodes in graph.uses.items():
        shape = shape_of(nodes[0])
        refusal: Refusal | None = None
        for axis in range(len(shape or ())):
            assert shape is not None
            if shape[axis] < 2:
                continue
            found = Propagation(graph, rule_of, name, axis_labels(shape, axis)).run()
            fold = _fold(name, shape[axis], found)
            if fold is not None:
                folds.append(fold)
                break
            divided = tuple(key for key, labels in found.scaled.items() if bool((labels < 0).any()))
            if divided and refusal is None:
                refusal = Refusal(name, next(iter(found.blocked.values())), divided)
        else:
            if refusal is not None:
                refusals.append(refusal)
    return folds, refusals


def _fold(name: str, scales: int, found: Propagation) -> Fold | None:
    left = {key: labels for key, given in found.scaled.items() if (labels := found.unblocked(given)) is not None}
    free = torch.zeros(scales, dtype=torch.bool, device="cpu")
    divided: set[int] = set()
    for labels in left.values():
        divided |= ids(labels[labels < 0])
    useful = sorted(found.free & divided)
    if not useful:
        return None
    free[torch.tensor(useful, dtype=torch.int64, device="cpu") - 1] = True
    return Fold(name, scales, free, left, found.shifts)
