"""Names in a folder and names in the model that it is loaded into."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


def users_renamings(conversions: list[Any], model: Any) -> list[Any]:
    """The conversions that come from the argument `key_mapping`: the first ones, before those of the model."""
    return conversions[: len(conversions) - len(get_model_conversion_mapping(model))]


def renamings_of(conversions: list[Any]) -> list[WeightRenaming]:
    """Those conversions that change names only."""
    return [each for each in conversions if isinstance(each, WeightRenaming)]


def model_names(stored: Iterable[str], conversions: list[Any], model: Any) -> dict[str, str]:
    """Name of a parameter in the model -> its name in the files, as transformers renames it while loading.

    Raises:
        ValueError: the model fuses a stored weight with others, which it cannot do with codes.
    """
    renamings = renamings_of(conversions)
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    state = model.state_dict()
    found = {}
    for name in stored:
        new, _ = rename_source_key(name, renamings, [], model.base_model_prefix, state)
        fused, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if new not in state and pattern is not None and fused in state:
            raise ValueError(f"qtorch: {name} is stored quantized, and a part of {fused}; quantize that as a whole")
        found[new] = name
    return found
