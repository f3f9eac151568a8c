"""Slots: the places of a model that hold weights.

A *slot* is a place that holds a parameter: a module and an attribute name. A tied weight is one parameter in several
slots; it is one `Target`, is quantized once and stays tied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import nn

from .prepared_module import is_sharded
from .weight_kinds import UNKNOWN, WeightKind

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
