"""Schemes of quantization-aware training by the names that Unsloth (`qat_scheme`) and axolotl (`qat:`) give them."""

from __future__ import annotations

from collections.abc import Callable

from .. import recipes
from ..recipes.base import Recipe, WeightRecipe
from ..training import qat

SCHEMES: dict[str, Callable[[], WeightRecipe]] = {
    "int4": lambda: recipes.int4_weight_only(group_size=128),
    "int8-int4": lambda: recipes.int8_dynamic_activation_int4_weight(group_size=32),
    "fp8-int4": recipes.float8_dynamic_activation_int4_weight,
    "fp8-fp8": recipes.float8_dynamic_activation_float8_weight,
    "int8": recipes.int8_weight_only,
    "int8-int8": recipes.int8_dynamic_activation_int8_weight,
    "mxfp4": recipes.mxfp4_weight_only,
    "nvfp4": recipes.nvfp4_weight_only,
}
"""Dtype of the weight, or those of activation and weight -> recipe of the converted layers."""


def qat_scheme(name: str) -> Recipe:
    """The recipe that trains for the scheme `name`, such as "int8-int4"; "fp8" may be written "float8".

    Raises:
        ValueError: there is no scheme of that name.
    """
    key = str(name).lower().replace("float8", "fp8").replace("_", "-")
    if key not in SCHEMES:
        raise ValueError(f"qat_scheme: {name!r:.40} is not known, want one of {', '.join(SCHEMES)}")
    return qat(SCHEMES[key]())
