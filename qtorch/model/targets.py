"""Targets: the weights of a model to which a recipe, or a mapping of names to recipes, applies.

A recipe reaches kinds of weights (`reach`), a key of a mapping also what it names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from .install import QuantizationState, is_sharded
from .weight_kinds import KINDS, LINEAR_KINDS, UNKNOWN, WeightKind, kind_in

# --------------------------------------------------------------------------------------------------
# Slots: the places of a model that hold weights.
#
# A *slot* is a place that holds a parameter: a module and an attribute name. A tied weight is one parameter in several
# slots; it is one `Target`, is quantized once and stays tied.


R = TypeVar("R")

_SHARDED = (
    "is sharded, and its scales are of the whole weight: call quantize_ before fully_shard, on the meta device if "
    "one process cannot hold the model; convert() takes a model in one piece, with the full state dict of this one"
)


@dataclass
class Slot(Generic[R]):
    """A place that holds a weight, with its recipe or the reason why it has none.

    Attributes:
        refused: whether the mapping says None for it.
        kind: what it is to its module.
        unreached: why it has to be asked for by name; empty for what `targets` reaches.
    """

    module: nn.Module
    module_name: str
    attribute: str
    parameter: nn.Parameter
    recipe: R | None = None
    reason: str = ""
    refused: bool = False
    kind: WeightKind = UNKNOWN
    unreached: str = ""

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def is_linear(self) -> bool:
        return self.kind.name == "linear"

    @property
    def is_embedding(self) -> bool:
        return self.kind.name == "embedding"

    @property
    def is_conv(self) -> bool:
        return self.kind.is_conv

    @property
    def is_filtered(self) -> bool:
        """Whether `filter_fn` is asked for it even if `targets` does not reach it."""
        return not self.obstacle and self.kind.name in ("embedding", "convolution")

    @property
    def obstacle(self) -> str | None:
        """Why no recipe can quantize the weight, or None."""
        return self.kind.obstacle

    def is_one_of(self, types: tuple[type, ...]) -> bool:
        """Whether the parameter, or the module whose weight it is, has one of these types."""
        held = getattr(self.parameter, "_local_tensor", self.parameter)
        return isinstance(held, types) or (self.attribute == "weight" and isinstance(self.module, types))

    @property
    def label(self) -> str:
        """The name for messages: that of the module for the weight of a layer, else that of the parameter."""
        return self.module_name if self.kind.is_layer and self.module_name else self.name


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

    @property
    def kind(self) -> WeightKind:
        return self.asked.kind

    @property
    def obstacle(self) -> str | None:
        """Why no recipe can quantize the weight, or None."""
        if found := next(filter(None, (slot.obstacle for slot in self.slots)), None):
            return found
        if len({slot.kind.held for slot in self.slots}) > 1:
            names = " and ".join(f"{slot.name} ({slot.kind.name})" for slot in self.slots[:4])
            return f"is shared by {names}, which contract different axes of it"
        return _SHARDED if is_sharded(self.parameter) else None


# --------------------------------------------------------------------------------------------------
# Reach: which weights a recipe reaches that are not asked for by name, the argument `targets` of `quantize_`.
#
#     "linear"        what multiplies like a linear layer: linear layers, whichever way around they store their weight,
#                     the experts of a mixture, the projections of attention
#     "all"           everything that can be quantized: embeddings, convolutions and routers, too
#     some of KINDS   these kinds
#     find_uses(...)  what took part in products
#
# Routers, which choose among experts, are tiny, and an error in them sends tokens to other experts: except for "all"
# and by name they stay in floating point. A head that is tied to an embedding is a linear layer, and one weight with
# it.


class UseOfWeight(Protocol):
    """What `find_uses` says of a parameter."""

    @property
    def obstacle(self) -> str | None:
        """Why it is not quantized, or None."""

    @property
    def kind(self) -> WeightKind:
        """The kind of a parameter of which nothing else is known."""


Reach = str | Collection[str] | Mapping[str, UseOfWeight]
"""Which weights a recipe reaches by itself; see the argument `targets` of `quantize_`."""


def find_reach(slots: Sequence[Slot[Any]], targets: Reach) -> None:
    """Set `unreached` of the slots: why a recipe, or a wildcard, does not reach them by itself."""
    if isinstance(targets, Mapping):
        for slot in slots:
            use = targets.get(slot.name)
            slot.unreached = slot.obstacle or ("not in what find_uses returned" if use is None else use.obstacle or "")
            if not slot.unreached and slot.kind is UNKNOWN:
                assert use is not None
                slot.kind = use.kind
            if slot.kind.name == "router":
                slot.unreached = _ROUTER
        return
    kinds = _kinds(targets)
    for slot in slots:
        name = slot.kind.name
        if slot.obstacle:
            slot.unreached = slot.obstacle
        elif name == "router" and name not in kinds:
            slot.unreached = _ROUTER
        elif name in KINDS and name not in kinds:
            article = "an" if name[0] in "aeiou" else "a"
            slot.unreached = f'{article} {name}; ask for it by name, or with targets="all"'
        elif name not in KINDS:
            slot.unreached = f"a bare parameter of {type(slot.module).__name__}; ask for it by name"


_ROUTER = 'a router, which stays in floating point; ask for it by name, or with targets="all"'


def _kinds(targets: object) -> frozenset[str]:
    """The kinds that a word, or some words, stand for."""
    words = [targets] if isinstance(targets, str) else list(targets) if isinstance(targets, Collection) else [targets]
    found: set[str] = set()
    for word in words:
        if not isinstance(word, str) or (word != "all" and word not in KINDS):
            known = ", ".join(map(repr, ["all", *sorted(KINDS)]))
            raise ValueError(
                f"quantize_: targets is one or some of {known}, or what find_uses(model, *inputs) returns; got {word!r}"
            )
        found |= KINDS if word == "all" else LINEAR_KINDS if word == "linear" else {word}
    return frozenset(found)


def unreached_by(slot: Slot[Any], recipe: Any) -> str | None:
    """Why `recipe` does not reach a weight that is not asked for by name, or None."""
    declines: Callable[[WeightKind], str | None] | None = getattr(recipe, "declines", None)
    return slot.unreached or (declines(slot.kind) if declines is not None else None)


__all__ = ["Filter", "Reach", "Slot", "Target", "find_targets", "is_asked_by_name"]


Filter = Callable[[nn.Module, str], bool]


_ANY_NAME = "qzqzq"
"""Placeholder for a name that a user's regular expression can match only by a wildcard."""


def find_targets(
    model: nn.Module,
    recipe: R | Mapping[str, R | None],
    filter_fn: Filter | None,
    targets: Reach = "linear",
) -> list[Target[R]]:
    """All weights of two or more dimensions, each with its recipe or the reason why it has none.

    Args:
        recipe: one recipe, for all weights that `targets` reaches or for the types of weights and modules that it
            `selects`; or an ordered mapping; see `quantize_`.
        filter_fn: (module, fully-qualified name) -> bool, called for each weight that `targets` reaches, and for
            embeddings and convolutions.
        targets: see `quantize_`.

    Raises:
        ValueError: an entry of the mapping matches nothing or is never reached, a tied weight has several recipes, or
            `targets` is unknown.
    """
    slots: list[Slot[R]] = _slots(model)
    find_reach(slots, targets)
    if isinstance(recipe, Mapping):
        _assign_by_name(slots, recipe, filter_fn)
    else:
        _assign_by_kind(slots, recipe, filter_fn)
    found: dict[int, Target[R]] = {}
    for slot in slots:
        found.setdefault(id(slot.parameter), Target()).slots.append(slot)
    for target in found.values():
        _check_tied(target)
    return list(found.values())


def _slots(model: nn.Module) -> list[Slot[R]]:
    modules = [*model.named_modules(remove_duplicate=False)]
    names = {name for name, _ in modules}
    found: list[Slot[R]] = []
    for module_name, module in modules:
        if isinstance(module, QuantizationState):
            continue
        for attribute, parameter in module._parameters.items():
            # Parameters that are not materialized yet have no shape; `check` of the recipe raises for them.
            if parameter is not None and (nn.parameter.is_lazy(parameter) or parameter.dim() >= 2):
                kind = kind_in(module, module_name, attribute, names)
                found.append(Slot(module, module_name, attribute, parameter, kind=kind))
    return found


def _assign_by_kind(slots: list[Slot[R]], recipe: R, filter_fn: Filter | None) -> None:
    selects: tuple[type, ...] = getattr(recipe, "selects", ())
    for slot in slots:
        if slot.obstacle:
            slot.reason = slot.obstacle
        elif selects and not slot.is_one_of(selects):
            slot.reason = f"no {' or '.join(kind.__name__ for kind in selects)}"
        elif not selects and (reason := unreached_by(slot, recipe)) and not (filter_fn and slot.is_filtered):
            slot.reason = reason
        elif filter_fn is not None and not filter_fn(slot.module, slot.module_name):
            slot.reason = "filter_fn"
        else:
            slot.recipe = recipe


def _assign_by_name(slots: list[Slot[R]], recipes: Mapping[str, R | None], filter_fn: Filter | None) -> None:
    matches = dict.fromkeys(recipes, 0)
    wins = dict(matches)
    _check_keys(recipes, slots)
    for slot in slots:
        found = [key for key, recipe in recipes.items() if _asks_for(key, slot, recipe)]
        for key in found:
            matches[key] += 1
        if not found:
            wildcard = next((key for key in recipes if _matches(key, slot)), None)
            slot.reason = "no entry of the mapping asks for it"
            if wildcard is not None:
                why = unreached_by(slot, recipes[wildcard])
                slot.reason = f"{wildcard!r} matches it by a wildcard alone, and it is {why}"
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


def _asks_for(key: str, slot: Slot[R], recipe: R | None = None) -> bool:
    """Whether a key selects a slot.

    An exact name selects any weight. A regular expression selects what `targets` reaches, and other weights only if it
    names them: if it still matches with their last name replaced by a placeholder, only a wildcard has matched.
    """
    return (not unreached_by(slot, recipe) and _matches(key, slot)) or is_asked_by_name(key, slot)


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
    """Message for a key that matches `slots`, none of which `targets` reaches, by a wildcard alone."""
    some = ", ".join(slot.label for slot in slots[:4]) + (", ..." if len(slots) > 4 else "")
    own = list(dict.fromkeys(slot.label.rpartition(".")[2] for slot in slots))
    parents = {slot.label.rpartition(".")[0].rpartition(".")[2] for slot in slots}
    names = own[0] if len(own) == 1 else f"({'|'.join(own)})"
    inside = f"{parents.pop()}\\." if len(parents) == 1 and not next(iter(parents)).isdecimal() else ""
    written = rf".*\.{inside}{names}"
    if not all(_asks_for(written, slot) for slot in slots):
        written = "|".join(re.escape(slot.label) for slot in slots[:4])
    return (
        f"{key!r} matches {some} by a wildcard alone, which selects what multiplies like a linear layer; routers, "
        f'embeddings, convolutions and bare parameters are selected by their last name: r"{written}"'
    )


def _check_tied(target: Target[R]) -> None:
    asked = {slot.label: slot.recipe for slot in target.slots if slot.recipe is not None or slot.refused}
    if len(set(asked.values())) > 1:
        what = ", ".join(f"{label}: {recipe}" for label, recipe in asked.items())
        raise ValueError(f"quantize_: a tied weight takes one recipe, got different ones: {what}")
