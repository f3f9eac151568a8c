"""Reach: which weights a recipe reaches that are not asked for by name, the argument `targets` of `quantize_`.

    "linear"        what multiplies like a linear layer: linear layers, whichever way around they store their weight,
                    the experts of a mixture, the projections of attention
    "all"           everything that can be quantized: embeddings, convolutions and routers, too
    some of KINDS   these kinds
    find_uses(...)  what took part in products

Routers, which choose among experts, are tiny, and an error in them sends tokens to other experts: except for "all" and
by name they stay in floating point. A head that is tied to an embedding is a linear layer, and one weight with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from .slots import Slot
from .weight_kinds import KINDS, LINEAR_KINDS, UNKNOWN, WeightKind


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
