"""Targets: the weights of a model to which a recipe, or a mapping of names to recipes, applies.

A *slot* is a place that holds a parameter: a module and an attribute name. A tied weight is one parameter in several
slots; it is one `Target`, is quantized once and stays tied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import nn
from torch.nn.utils import parametrize

from .dtypes.conv import CONVS
from .dtypes.embedding import EMBEDDINGS
from .prepared_module import QuantizationState

R = TypeVar("R")

Filter = Callable[[nn.Module, str], bool]

UNSUPPORTED: tuple[type[nn.Module], ...] = (nn.modules.conv._ConvTransposeNd, nn.Bilinear, nn.RNNBase)
"""Modules without quantized kernels; `nn.LSTM`, `nn.GRU` and `nn.RNN` run fused kernels on all their weights."""

_ANY_NAME = "qzqzq"
"""Placeholder for a name that a user's regular expression can match only by a wildcard."""


@dataclass
class Slot(Generic[R]):
    """A place that holds a weight, with its recipe or the reason why it has none."""

    module: nn.Module
    module_name: str
    attribute: str
    parameter: nn.Parameter
    recipe: R | None = None
    reason: str = ""
    refused: bool = False

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def is_linear(self) -> bool:
        return isinstance(self.module, nn.Linear) and self.attribute == "weight"

    @property
    def is_embedding(self) -> bool:
        return isinstance(self.module, EMBEDDINGS) and self.attribute == "weight"

    def is_one_of(self, types: tuple[type, ...]) -> bool:
        """Whether the parameter, or the module whose weight it is, has one of these types."""
        return isinstance(self.parameter, types) or (self.attribute == "weight" and isinstance(self.module, types))

    @property
    def is_conv(self) -> bool:
        return isinstance(self.module, CONVS) and self.attribute == "weight"

    @property
    def is_layer(self) -> bool:
        """Whether it is the weight of a linear layer, embedding or convolution, rather than a bare parameter."""
        return self.is_linear or self.is_embedding or self.is_conv

    @property
    def obstacle(self) -> str | None:
        """Why no recipe can quantize the weight, or None."""
        if isinstance(self.module, parametrize.ParametrizationList):
            return "is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
        if isinstance(self.module, UNSUPPORTED):
            return f"is a parameter of {type(self.module).__name__}, which has no quantized kernel"
        if self.is_embedding and self.module.max_norm is not None:
            return f"is the table of an {type(self.module).__name__} with max_norm, which rewrites the table"
        return None

    @property
    def label(self) -> str:
        """The name for messages: that of the module for the weight of a layer, else that of the parameter."""
        return self.module_name if self.is_layer and self.module_name else self.name


@dataclass
class Target(Generic[R]):
    """One weight with all the slots that share it, and its recipe (None to leave it alone)."""

    slots: list[Slot[R]] = field(default_factory=list)

    @property
    def parameter(self) -> nn.Parameter:
        return self.slots[0].parameter

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that hold the weight, without duplicates."""
        return list(dict.fromkeys(slot.module for slot in self.slots))

    @property
    def asked(self) -> Slot[R]:
        """The slot with a recipe, or the first slot."""
        return next((slot for slot in self.slots if slot.recipe is not None), self.slots[0])

    @property
    def recipe(self) -> R | None:
        return self.asked.recipe


def find_targets(model: nn.Module, recipe: R | Mapping[str, R | None], filter_fn: Filter | None) -> list[Target[R]]:
    """All weights of two or more dimensions, each with its recipe or the reason why it has none.

    Args:
        recipe: one recipe, for every `nn.Linear` or for the types of weights and modules that it `selects`; or an
            ordered mapping; see `quantize_`.
        filter_fn: (module, fully-qualified name) -> bool, called for each `nn.Linear`, embedding and convolution.

    Raises:
        ValueError: an entry of the mapping matches nothing or is never reached, or a tied weight has several recipes.
    """
    slots: list[Slot[R]] = _slots(model)
    if isinstance(recipe, Mapping):
        _assign_by_name(slots, recipe, filter_fn)
    else:
        _assign_by_kind(slots, recipe, filter_fn)
    targets: dict[int, Target[R]] = {}
    for slot in slots:
        targets.setdefault(id(slot.parameter), Target()).slots.append(slot)
    for target in targets.values():
        _check_tied(target)
    return list(targets.values())


def _slots(model: nn.Module) -> list[Slot[R]]:
    found: list[Slot[R]] = []
    for module_name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizationState):
            continue
        for attribute, parameter in module._parameters.items():
            # Parameters that are not materialized yet have no shape; `check` of the recipe raises for them.
            if parameter is not None and (nn.parameter.is_lazy(parameter) or parameter.dim() >= 2):
                found.append(Slot(module, module_name, attribute, parameter))
    return found


def _assign_by_kind(slots: list[Slot[R]], recipe: R, filter_fn: Filter | None) -> None:
    selects: tuple[type, ...] = getattr(recipe, "selects", ())
    for slot in slots:
        if slot.obstacle:
            slot.reason = slot.obstacle
        elif selects and not slot.is_one_of(selects):
            slot.reason = f"no {' or '.join(kind.__name__ for kind in selects)}"
        elif not selects and not slot.is_layer:
            slot.reason = f"a bare parameter of {type(slot.module).__name__}; ask for it by name"
        elif not selects and filter_fn is None and not slot.is_linear:
            what = "an embedding" if slot.is_embedding else "a convolution"
            slot.reason = f"{what}; ask for it by name or with filter_fn"
        elif filter_fn is not None and not filter_fn(slot.module, slot.module_name):
            slot.reason = "filter_fn"
        else:
            slot.recipe = recipe


def _assign_by_name(slots: list[Slot[R]], recipes: Mapping[str, R | None], filter_fn: Filter | None) -> None:
    matches = dict.fromkeys(recipes, 0)
    wins = dict(matches)
    _check_keys(recipes, slots)
    for slot in slots:
        found = [key for key in recipes if _asks_for(key, slot)]
        for key in found:
            matches[key] += 1
        if not found:
            wildcard = next((key for key in recipes if _matches(key, slot)), None)
            slot.reason = "no entry of the mapping asks for it"
            if wildcard is not None:
                slot.reason = f"{wildcard!r} matches it by a wildcard alone; ask for it by name"
            continue
        wins[found[0]] += 1
        if filter_fn is not None and not filter_fn(slot.module, slot.module_name):
            slot.reason = "filter_fn"
        elif recipes[found[0]] is None:
            slot.refused = True
            slot.reason = f"None for {found[0]!r}"
        else:
            slot.recipe = recipes[found[0]]
    if unmatched := [key for key, count in matches.items() if not count]:
        raise ValueError(_describe_unmatched(unmatched, slots))
    if shadowed := [key for key, count in wins.items() if not count]:
        raise ValueError(
            f"quantize_: {', '.join(map(repr, shadowed))}: all that it matches is taken by entries before it; "
            "the first entry that matches wins"
        )


def _check_keys(keys: Iterable[str], slots: list[Slot[R]]) -> None:
    names = {name for slot in slots for name in (slot.name, slot.label)}
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"quantize_: the mapping takes names and regular expressions, got {key!r}")
        try:
            re.compile(key)
        except re.error as error:
            if key not in names:
                raise ValueError(f"quantize_: {key!r} is neither a name nor a regular expression: {error}") from error


def _asks_for(key: str, slot: Slot[R]) -> bool:
    """Whether a key selects a slot.

    An exact name selects any weight. A regular expression selects linear layers, and other weights only if it names
    them: if it still matches with their last name replaced by a placeholder, only a wildcard has matched.
    """
    return (slot.is_linear and _matches(key, slot)) or is_asked_by_name(key, slot)


def is_asked_by_name(key: str, slot: Slot[R]) -> bool:
    """Whether a key selects a slot by its exact or its last name, rather than by a wildcard alone."""
    return any(
        key == name or (_fully_matches(key, name) and not _fully_matches(key, _with_own_name_replaced(name)))
        for name in (slot.name, slot.label)
    )


def _matches(key: str, slot: Slot[R]) -> bool:
    """Whether the key is the name of the slot, or a regular expression that matches it, even by a wildcard alone."""
    return any(key == name or _fully_matches(key, name) for name in (slot.name, slot.label))


def _fully_matches(key: str, name: str) -> bool:
    try:
        return re.fullmatch(key, name) is not None
    except re.error:  # a key that is the exact name of another slot; see _check_keys
        return False


def _with_own_name_replaced(name: str) -> str:
    """Replace the last name by the placeholder: ``embed`` in both ``a.embed`` and ``a.embed.weight``."""
    own = name.removesuffix(".weight")
    parent, dot, _ = own.rpartition(".")
    return parent + dot + _ANY_NAME + name[len(own) :]


def _describe_unmatched(keys: list[str], slots: list[Slot[R]]) -> str:
    labels = [slot.label for slot in slots]
    lines = []
    for key in keys:
        if by_wildcard := [slot for slot in slots if _matches(key, slot)]:
            lines.append(_describe_wildcard(key, by_wildcard))
            continue
        inside = [slot for slot in slots if slot.label.startswith(f"{key}.")]
        hint = f"; for what is inside it, write {key + '.*'!r} as a regular expression" if inside else ""
        if inside and all(slot.obstacle for slot in inside):
            hint = f"; {inside[0].label} {inside[0].obstacle}"
        lines.append(
            f"{key!r} matches no linear layer, embedding, convolution or parameter of two or more dimensions{hint}"
        )
    some = ", ".join(labels[:4]) + (", ..." if len(labels) > 4 else "")
    return f"quantize_: {'; '.join(lines)}. The model has {some or 'no such weight'}"


def _describe_wildcard(key: str, slots: list[Slot[R]]) -> str:
    """Message for a key that matches `slots`, none of them a linear layer, by a wildcard alone."""
    some = ", ".join(slot.label for slot in slots[:4]) + (", ..." if len(slots) > 4 else "")
    own = list(dict.fromkeys(slot.label.rpartition(".")[2] for slot in slots))
    parents = {slot.label.rpartition(".")[0].rpartition(".")[2] for slot in slots}
    names = own[0] if len(own) == 1 else f"({'|'.join(own)})"
    inside = f"{parents.pop()}\\." if len(parents) == 1 and not next(iter(parents)).isdecimal() else ""
    written = rf".*\.{inside}{names}"
    if not all(_asks_for(written, slot) for slot in slots):
        written = "|".join(re.escape(slot.label) for slot in slots[:4])
    return (
        f"{key!r} matches {some} by a wildcard alone, which selects linear layers only; embeddings, convolutions and "
        f'bare parameters, such as fused experts, are selected by their last name: r"{written}"'
    )


def _check_tied(target: Target[R]) -> None:
    asked = {slot.label: slot.recipe for slot in target.slots if slot.recipe is not None or slot.refused}
    if len(set(asked.values())) > 1:
        what = ", ".join(f"{label}: {recipe}" for label, recipe in asked.items())
        raise ValueError(f"quantize_: a tied weight takes one recipe, got different ones: {what}")
