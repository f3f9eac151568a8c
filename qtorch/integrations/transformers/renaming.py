"""Names in a folder and names in the model that it is loaded into."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


def users_renamings(conversions: list[Any], model: Any) -> list[Any]:
    """The conversions that come from the argument `key_mapping`: the first ones, before those of the model."""
    return conversions[: len(conversions) - len(get_model_conversion_mapping(model))]


def renamings_of(conversions: list[Any]) -> list[WeightRenaming]:
    """Those conversions that change names only."""
    return [each for each in conversions if isinstance(each, WeightRenaming)]


class Origin(NamedTuple):
    """What a parameter of a model is made of.

    Attributes:
        converter: of the model, which fuses or splits what is stored; None for a weight that is stored as it is.
        names: source pattern of the converter -> stored names, in the order in which the converter takes them.
    """

    converter: WeightConverter | None
    names: dict[str, list[str]]


def origins(stored: Iterable[str], others: Iterable[str], conversions: list[Any], model: Any) -> dict[str, Origin]:
    """Name of a parameter in the model -> what it is made of, as transformers renames and fuses it while loading.

    A converter that makes several parameters of one is under the name of the first one.

    Args:
        stored: names of the quantized tensors of the files.
        others: names of the other ones.

    Raises:
        ValueError: the model fuses a quantized weight with one in floating point.
    """
    renamings = renamings_of(conversions)
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = model.state_dict()
    found: dict[str, Origin] = {}
    for name in sorted(stored, key=dot_natural_key):
        place, _ = rename_source_key(name, renamings, [], model.base_model_prefix, state)
        fused, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if place in state or pattern is None or fused not in state:
            found[place] = Origin(None, {"": [name]})
        else:
            found.setdefault(fused, Origin(by_pattern[pattern], {})).names.setdefault(pattern, []).append(name)
    for name in others:
        fused, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if fused in found and found[fused].converter is not None:
            one = next(iter(found[fused].names.values()))[0]
            raise ValueError(
                f"qtorch: {one} is stored quantized, {name} is not, and both are parts of {fused}; quantize that as a "
                "whole"
            )
    return found
