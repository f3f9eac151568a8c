"""The entry `quantization_config` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ...primitives.jsonable import from_json, to_json

QUANT_METHOD = "qtorch"

VERSION = 1

Names = Literal["model", "checkpoint"]
"""Whose names the folder stores: those of the model in memory, or those of an older checkpoint, which transformers has
to rename (and whose experts it has to fuse) while it loads them."""


def quantization_config(recipe: Any = None, names: Names = "model", **more: Any) -> dict[str, Any]:
    """The JSON data of `quantization_config` in config.json.

    Args:
        recipe: the recipe, or the mapping of names to recipes, for people who read the file: loading does not need it.
            What has no JSON form is written as text.
        names: see `Names`.
        more: further keys, as JSON data.
    """
    return {"quant_method": QUANT_METHOD, "version": VERSION, "recipe": recipe_json(recipe), "names": names, **more}


def recipe_json(recipe: Any) -> Any:
    """A recipe as JSON data, a mapping as a list of pairs, whose order counts; a recipe with data becomes its text."""
    if isinstance(recipe, Mapping):
        return [[name, recipe_json(each)] for name, each in recipe.items()]
    if getattr(recipe, "data", None) is not None:
        return str(recipe)
    try:
        return to_json(recipe)
    except TypeError:
        return str(recipe)


def read_recipe(data: Any) -> Any:
    """Inverse of `recipe_json`; text, and what this version does not know, stay as they are."""
    if isinstance(data, list) and all(isinstance(item, list | tuple) and len(item) == 2 for item in data):
        return {name: read_recipe(each) for name, each in data}
    try:
        return from_json(data) if isinstance(data, dict) else data
    except ValueError:
        return data


def is_ours(config: Any) -> bool:
    """Whether the contents of a config.json say that the folder is of this format."""
    entry = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(entry, dict) and entry.get("quant_method") == QUANT_METHOD
