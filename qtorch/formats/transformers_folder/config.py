"""The entry `quantization_config` of config.json."""

from __future__ import annotations

from typing import Any, Literal

from ...primitives.jsonable import to_json

QUANT_METHOD = "qtorch"

VERSION = 1

Names = Literal["model", "checkpoint"]
"""Whose names the folder stores: those of the model in memory, or those of an older checkpoint, which transformers has
to rename (and whose float weights it has to fuse) while it loads them."""


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
    """A recipe, or a mapping to recipes, as JSON data; a recipe with data or functions becomes its text."""
    if isinstance(recipe, dict):
        return {name: recipe_json(each) for name, each in recipe.items()}
    try:
        return to_json(recipe)
    except TypeError:
        return str(recipe)


def is_ours(config: Any) -> bool:
    """Whether the contents of a config.json say that the folder is of this format."""
    entry = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(entry, dict) and entry.get("quant_method") == QUANT_METHOD
