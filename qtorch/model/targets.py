"""Targets: the weights of a model, each with the recipe that it gets or the reason why it gets none.

`find_targets` goes through the *slots* of the model, the places that hold a parameter (a module and the name of an
attribute). The argument `targets` of `quantize_` includes slots by their kind; a key of a mapping also selects what it
names. A tied weight is one parameter in several slots: one `Target`, quantized once.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import nn

from ..primitives.tracing import is_sharded, plain_name
from .install import QuantizationState
from .weight_kinds import KINDS, LINEAR_KINDS, UNKNOWN, WeightKind, kind_in

R = TypeVar("R")


class Refused(ValueError):
    """What was asked for cannot be done; see `named_errors`."""


@contextmanager
def named_errors(function: str) -> Iterator[None]:
    """Decorator of a public function: what is `Refused` inside is a `ValueError` that begins with its name."""
    try:
        yield
    except Refused as error:
        raise ValueError(f"{function}: {error}") from error


Filter = Callable[[nn.Module, str], bool]

_SHARDED = (
    "is sharded, and its scales are of the whole weight: call quantize_ before fully_shard, on the meta device if "
    "one process cannot hold the model; convert() takes a model in one piece, with the full state dict of this one"
)

# Routers are tiny, and an error in them sends tokens to other experts.
_ROUTER = 'a router, which stays in floating point; ask for it by name, or with targets="all"'

_ANY_NAME = "qzqzq"
"""Placeholder for a name that a user's regular expression can match only by a wildcard."""


Reach = str | Collection[str] | Mapping[str, Any]
"""The argument `targets` of `quantize_`: kinds, or what `find_uses` returns."""


@dataclass
class Slot(Generic[R]):
    """A place that holds a weight of a kind, with its recipe or the `reason` why it has none: the mapping says None for
    it (`refused`), or `targets` does not include it, so that it has to be asked for by name (`excluded` says why)."""

    module: nn.Module
    module_name: str
    attribute: str
    parameter: nn.Parameter
    recipe: R | None = None
    reason: str = ""
    refused: bool = False
    kind: WeightKind = UNKNOWN
    excluded: str = ""

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

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
    def slot(self) -> Slot[R]:
        """The slot with a recipe, or the first slot."""
        return next((slot for slot in self.slots if slot.recipe is not None), self.slots[0])

    @property
    def recipe(self) -> R | None:
        return self.slot.recipe

    @property
    def kind(self) -> WeightKind:
        return self.slot.kind

    @property
    def obstacle(self) -> str | None:
        """Why no recipe can quantize the weight, or None."""
        if found := next(filter(None, (slot.kind.obstacle for slot in self.slots)), None):
            return found
        if len({slot.kind.held for slot in self.slots}) > 1:
            names = " and ".join(f"{slot.name} ({slot.kind.name})" for slot in self.slots[:4])
            return f"is shared by {names}, which contract different axes of it"
        return _SHARDED if is_sharded(self.parameter) else None


def find_targets(
    model: nn.Module, recipe: R | Mapping[str, R | None], filter_fn: Filter | None, targets: Reach = "linear"
) -> list[Target[R]]:
    """All weights of two or more dimensions, each with its recipe or the reason why it has none; see `quantize_`. One
    recipe is for all weights that `targets` includes, or for the types of weights and modules that it `selects`.
    `filter_fn` is called for each weight that `targets` includes, and for embeddings and convolutions."""
    slots: list[Slot[R]] = _slots(model)
    exclude: Any = _exclude_by_use if isinstance(targets, Mapping) else _exclude_by_kind
    exclude(slots, targets)
    assign: Any = _assign_by_name if isinstance(recipe, Mapping) else _assign_by_kind
    assign(slots, recipe, filter_fn)
    found: dict[int, Target[R]] = {}
    for slot in slots:
        found.setdefault(id(slot.parameter), Target()).slots.append(slot)
    for target in found.values():
        recipes = {slot.label: slot.recipe for slot in target.slots if slot.recipe is not None or slot.refused}
        if len(set(recipes.values())) > 1:
            what = ", ".join(f"{label}: {recipe}" for label, recipe in recipes.items())
            raise Refused(f"a tied weight takes one recipe, got different ones: {what}")
    return list(found.values())


def _slots(model: nn.Module) -> list[Slot[R]]:
    modules = [(plain_name(name), module) for name, module in model.named_modules(remove_duplicate=False)]
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


def _exclude_by_use(slots: list[Slot[R]], uses: Mapping[str, Any]) -> None:
    """Set `excluded` where `find_uses` has seen no product, and the kind where nothing else tells it."""
    for slot in slots:
        use = uses.get(slot.name)
        slot.excluded = slot.kind.obstacle or ("not in what find_uses returned" if use is None else use.obstacle or "")
        if use is not None and not slot.excluded and slot.kind is UNKNOWN:
            slot.kind = use.kind
        if slot.kind.name == "router":
            slot.excluded = _ROUTER


def _exclude_by_kind(slots: list[Slot[R]], targets: object) -> None:
    words = [targets] if isinstance(targets, str) else list(targets) if isinstance(targets, Collection) else [targets]
    included: set[str] = set()
    for word in words:
        if not isinstance(word, str) or (word != "all" and word not in KINDS):
            known = ", ".join(map(repr, ["all", *sorted(KINDS)]))
            raise Refused(f"targets is one or some of {known}, or what find_uses(...) returns; got {word!r}")
        included |= KINDS if word == "all" else LINEAR_KINDS if word == "linear" else {word}
    for slot in slots:
        name = slot.kind.name
        if slot.kind.obstacle:
            slot.excluded = slot.kind.obstacle
        elif name not in KINDS:
            slot.excluded = f"a bare parameter of {type(slot.module).__name__}; ask for it by name"
        elif name not in included:
            article = "an" if name[0] in "aeiou" else "a"
            by_name = f'{article} {name}; ask for it by name, or with targets="all"'
            slot.excluded = _ROUTER if name == "router" else by_name


def _why_excluded(slot: Slot[Any], recipe: Any) -> str | None:
    """Why a weight gets `recipe` only if it is asked for by name, or None."""
    declines: Callable[[WeightKind], str | None] | None = getattr(recipe, "declines", None)
    return slot.excluded or (declines(slot.kind) if declines is not None else None)


def _assign_by_kind(slots: list[Slot[R]], recipe: R, filter_fn: Filter | None) -> None:
    selects: tuple[type, ...] = getattr(recipe, "selects", ())
    for slot in slots:
        filtered = filter_fn is not None and slot.kind.name in ("embedding", "convolution")
        if slot.kind.obstacle:
            slot.reason = slot.kind.obstacle
        elif selects and not (
            isinstance(getattr(slot.parameter, "_local_tensor", slot.parameter), selects)
            or (slot.attribute == "weight" and isinstance(slot.module, selects))
        ):
            slot.reason = f"no {' or '.join(kind.__name__ for kind in selects)}"
        elif not selects and not filtered and (reason := _why_excluded(slot, recipe)):
            slot.reason = reason
        elif filter_fn is not None and not filter_fn(slot.module, slot.module_name):
            slot.reason = "filter_fn"
        else:
            slot.recipe = recipe


def _assign_by_name(slots: list[Slot[R]], recipes: Mapping[str, R | None], filter_fn: Filter | None) -> None:
    names = {name for slot in slots for name in (slot.name, slot.label)}
    for key in recipes:
        try:
            re.compile(key)
        except re.error as error:
            if key not in names:
                hint = f"; write {key.replace('*', '.*')!r}" if key.startswith("*") else ""
                raise Refused(f"{key!r} is neither a name nor a regular expression: {error}{hint}") from error
    unmatched, unused, left = set(recipes), set(recipes), {}
    for slot in slots:
        matching = [key for key in recipes if _matches(key, slot)]
        found = [key for key in matching if not _why_excluded(slot, recipes[key]) or is_asked_by_name(key, slot)]
        unmatched.difference_update(found)
        if found:
            unused.discard(found[0])
        if not found and matching:
            why = _why_excluded(slot, recipes[matching[0]])
            slot.reason = f"{matching[0]!r} matches it by a wildcard alone, and it is {why}"
            left[matching[0]] = f"{slot.label} is {why}"
        elif not found:
            slot.reason = "no entry of the mapping asks for it"
        elif filter_fn is not None and not filter_fn(slot.module, slot.module_name):
            slot.reason = "filter_fn"
        elif recipes[found[0]] is None:
            slot.refused = True
            slot.reason = f"None for {found[0]!r}"
        else:
            slot.recipe = recipes[found[0]]
    for key in recipes:
        if key in unmatched:
            raise Refused(_why_unmatched(key, slots))
    if unused:
        shadowed = ", ".join(repr(key) for key in recipes if key in unused)
        others = "; ".join(left[key] for key in recipes if key in unused & left.keys())
        end = f", or stays as it is: {others}" if others else "; the first that matches wins"
        raise Refused(f"{shadowed}: all that it matches is taken by entries before it{end}")


def is_asked_by_name(key: str, slot: Slot[Any]) -> bool:
    """Whether a key selects a slot by its exact or its last name, rather than by a wildcard alone: a wildcard still
    matches when the last name, ``embed`` in ``a.embed`` and ``a.embed.weight``, is replaced by a placeholder."""
    for name in (slot.name, slot.label):
        own = name.removesuffix(".weight")
        parent, dot, _ = own.rpartition(".")
        replaced = parent + dot + _ANY_NAME + name[len(own) :]
        if key == name or (_fully_matches(key, name) and not _fully_matches(key, replaced)):
            return True
    return False


def _matches(key: str, slot: Slot[Any]) -> bool:
    """Whether the key is the name of the slot, or a regular expression that matches it, even by a wildcard alone."""
    return any(key == name or _fully_matches(key, name) for name in (slot.name, slot.label))


def _fully_matches(key: str, name: str) -> bool:
    try:
        return re.fullmatch(key, name) is not None
    except re.error:  # a key that is the exact name of another slot; see _assign_by_name
        return False


def _why_unmatched(key: str, slots: list[Slot[R]]) -> str:
    """Message for a key that selects no slot."""
    inside = [slot for slot in slots if slot.label.startswith(f"{key}.")]
    by_wildcard = [slot for slot in slots if _matches(key, slot)]
    some = ", ".join(slot.label for slot in (by_wildcard or slots)[:4])
    some += ", ..." if len(by_wildcard or slots) > 4 else ""
    if by_wildcard:
        return (
            f"{key!r} matches {some} by a wildcard alone, which selects what multiplies like "
            "a linear layer; ask for them by their last name, as "
            r'r".*\.experts\.(gate_up_proj|down_proj)" does, or with targets="all"'
        )
    hint = f"The model has {some or 'no such weight'}"
    if inside:
        hint = f"For what is inside it, write {key + '.*'!r} as a regular expression"
        if all(slot.kind.obstacle for slot in inside):
            hint = f"{inside[0].label} {inside[0].kind.obstacle}"
    what = "linear layer, embedding, convolution or parameter of two or more dimensions"
    return f"{key!r} matches no {what}. {hint}"
