"""The two `ConversionOps` of transformers' loading: one quantizes a weight, one reads a stored one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from .plan import Plan
from .stored_weights import StoredWeights
from .versions import apply_renamings

PREFIX = "qtorch:"
"""Begins the source patterns of `StoredNames`, which no other converter has."""


class Quantize(ConversionOps):
    """Quantizes one weight, right after it has been read (and its experts fused) and before the next one is."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        # A converter of the model that makes several parameters calls this once for all of them.
        found = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {
            name: [nn.Parameter(self.plan.quantize(name, value), requires_grad=False)]
            if name in self.plan.targets
            else [value]
            for name, value in found.items()
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantize:
        return self


class Deserialize(ConversionOps):
    """Makes a quantized tensor from its stored parts."""

    hf_quantizer = True
    """Tells transformers not to cast the parts to the dtype of the model."""

    def __init__(self, stored: StoredWeights, names: dict[str, str]) -> None:
        self.stored = stored
        self.names = names

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        place = kwargs["full_layer_name"]
        parts = {
            key.removeprefix(PREFIX): value[0] if isinstance(value, list) else value
            for key, value in input_dict.items()
        }
        return {place: [self.stored.parameter(self.names[place], parts, kwargs["model"], place)]}

    def __deepcopy__(self, memo: dict[int, Any]) -> Deserialize:
        return self


class StoredNames(WeightConverter):
    """Collects the stored parts of each parameter. It looks names up, where others match patterns.

    It takes a key if and only if it is a part, or the marker, of a quantized parameter; all others pass it.
    """

    __slots__ = ("owners",)

    def __init__(self, stored: StoredWeights, renamings: list[WeightRenaming], names: dict[str, str]) -> None:
        # transformers renames keys before it asks a converter.
        self.owners = {
            apply_renamings(key, renamings): (apply_renamings(name, renamings), part)
            for key, (name, part) in stored.owners.items()
        }
        parts = sorted({part for _, part in self.owners.values()})
        super().__init__([PREFIX + part for part in parts], "qtorch", operations=[Deserialize(stored, names)])

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key not in self.owners:
            return source_key, None
        name, part = self.owners[source_key]
        return name, PREFIX + part
