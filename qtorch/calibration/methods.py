"""Methods of calibration by name, for those who write a name instead of a call: configurations and the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..recipe import Recipe, WeightRecipe
from .auto import auto
from .gptq import gptq

METHODS: dict[str, Callable[[Any, Iterable[Any]], Any]] = {"auto": auto, "gptq": gptq}

Method = str | Callable[[Any, Iterable[Any]], Any]
"""A name in `METHODS`, or a function (recipe, batches) -> recipe."""


def with_data(recipe: Any, batches: Iterable[Any], method: Method) -> Any:
    """The recipe, or the mapping from names to recipes, by a method; recipes that have data, and None, stay.

    Raises:
        ValueError: there is no such method, or a recipe cannot be calibrated.
    """
    if isinstance(method, str) and method not in METHODS:
        raise ValueError(f"calibration: there is no method {method!r}; known are {', '.join(sorted(METHODS))}")
    make = METHODS[method] if isinstance(method, str) else method
    if isinstance(recipe, Mapping):
        return {name: with_data(each, batches, method) for name, each in recipe.items()}
    if recipe is None or (isinstance(recipe, Recipe) and recipe.data is not None):
        return recipe
    if not isinstance(recipe, WeightRecipe):
        raise ValueError(f"calibration: takes recipes for inference such as int4_weight_only(), got {recipe}")
    return make(recipe, batches)
