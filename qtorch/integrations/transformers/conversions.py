"""The two `ConversionOps` of transformers' loading: one quantizes a weight, one reads stored ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import copy, deepcopy
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import core_model_loading
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from ...dtypes import QuantizedTensor
from .loading_plan import Plan, StoredWeights, placed
from .versions import apply_renamings


class Origin(NamedTuple):
    """What a parameter is made of: by a converter of the model, which fuses or splits, of stored names by its source
    pattern, in the order in which it takes them; or, without one, of a weight as it is stored."""

    converter: WeightConverter | None
    names: dict[str, list[str]]


def origins(stored: Iterable[str], others: Iterable[str], conversions: list[Any], model: Any) -> dict[str, Origin]:
    """Name of a parameter in the model -> what it is made of, as transformers renames and fuses it while loading. A
    converter that makes several parameters of one is under the name of the first one."""
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = model.state_dict()
    found: dict[str, Origin] = {}
    for name in sorted(stored, key=core_model_loading.dot_natural_key):
        place, _ = core_model_loading.rename_source_key(name, renamings, [], model.base_model_prefix, state)
        fused, pattern = core_model_loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if place in state or pattern is None or fused not in state:
            found[place] = Origin(None, {"": [name]})
        else:
            found.setdefault(fused, Origin(by_pattern[pattern], {})).names.setdefault(pattern, []).append(name)
    for name in others:
        fused, _ = core_model_loading.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if fused in found and found[fused].converter is not None:
            one = next(iter(found[fused].names.values()))[0]
            raise ValueError(f"qtorch: {one} is stored quantized, {name} not, both are in {fused}; quantize all of it")
    return found


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
    """Makes quantized tensors from their stored parts, and lets the converter of the model fuse or split them."""

    hf_quantizer = True
    """Tells transformers not to cast the parts to the dtype of the model."""

    def __init__(self, stored: StoredWeights, origins: Mapping[str, Origin]) -> None:
        self.stored = stored
        self.origins = origins

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        place, model = kwargs["full_layer_name"], kwargs["model"]
        converter, names = self.origins[place]
        tensors = {
            pattern: self._tensors(of, {part: input_dict.get(_key(index, part)) for part in self.stored.parts})
            for index, (pattern, of) in enumerate(names.items())
        }
        if converter is None:
            return {place: [placed(tensors[""][0], model, place)]}
        run: Any = deepcopy(converter)
        run.collected_tensors = tensors
        made = run.convert(place, model=model, config=model.config)
        return {
            name: [placed(value[0] if isinstance(value, list) else value, model, name)] for name, value in made.items()
        }

    def _tensors(self, names: list[str], parts: dict[str, Any]) -> list[QuantizedTensor]:
        """The tensors of these names, of each part a list in the same order."""
        given = {part: found for part, found in parts.items() if found}
        if any(len(found) != len(names) for found in given.values()):
            raise ValueError(f"{names[0]} to {names[-1]} are not quantized alike")
        return [
            self.stored.tensor(name, {part: found[index] for part, found in given.items()})
            for index, name in enumerate(names)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Deserialize:
        return self


class StoredNames(WeightConverter):
    """Collects the stored parts of each parameter. It looks names up, where others match patterns: it takes a key if
    and only if it is a part, or the marker, of a quantized parameter; all others pass it."""

    __slots__ = ("owners",)

    def __init__(self, stored: StoredWeights, conversions: list[Any], model: Any) -> None:
        found = origins(stored.index.quantized, stored.others, conversions, model)
        places = {
            name: (place, index)
            for place, origin in found.items()
            for index, names in enumerate(origin.names.values())
            for name in names
        }
        # transformers renames keys before it asks a converter.
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        self.owners = {
            apply_renamings(key, renamings): (places[name][0], _key(places[name][1], part))
            for key, (name, part) in stored.owners.items()
        }
        patterns = sorted({pattern for _, pattern in self.owners.values()})
        super().__init__(patterns, "qtorch", operations=[Deserialize(stored, found)])

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return self.owners.get(source_key, (source_key, None))

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredNames:
        # transformers copies a converter for every key that it takes: the names are not copied with it.
        new = copy(self)
        new.collected_tensors, new.layer_targets = defaultdict(list), defaultdict(set)
        return new


def _key(index: int, part: str) -> str:
    """The source pattern of a part of what the converter of the model calls its source number `index`."""
    return f"{PREFIX}{index}:{part}"
