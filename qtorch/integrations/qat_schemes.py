"""Schemes of quantization-aware training by the names that Unsloth (`qat_scheme`) and axolotl (`qat:`) give them."""

from collections.abc import Callable

from .. import recipes
from ..recipes.base import Recipe, WeightRecipe
from ..training import qat

SCHEMES: dict[str, Callable[..., WeightRecipe]] = {
    "int4": lambda group_size=128: recipes.int4_weight_only(group_size=group_size),
    "int8-int4": lambda group_size=32: recipes.int8_dynamic_activation_int4_weight(group_size=group_size),
    "fp8-int4": recipes.float8_dynamic_activation_int4_weight,
    "fp8-fp8": recipes.float8_dynamic_activation_float8_weight,
    "int8": recipes.int8_weight_only,
    "int8-int8": recipes.int8_dynamic_activation_int8_weight,
    "cactus": lambda group_size=32: recipes.int8_weight_only(group_size=group_size),
    "mxfp4": recipes.mxfp4_weight_only,
    "nvfp4": recipes.nvfp4_weight_only,
}
"""Dtype of the weight, or those of activation and weight -> recipe of the converted linear layers."""


def qat_scheme(name: str, group_size: int | None = None) -> Recipe:
    """The recipe that trains for the scheme `name`, such as "int8-int4"; "fp8" may be written "float8" or
    "float8_e4m3fn". Embeddings stay in floating point, which "int8-int4" of Unsloth trains for int8.

    Args:
        group_size: elements of a row that share a scale, for the schemes "int4", "int8-int4" and "cactus"; None for
            Unsloth's, which is 128 for "int4" and 32 for the others. axolotl's is 32.

    Raises:
        ValueError: there is no scheme of that name, or it has no groups of other sizes.
    """
    key = str(name).lower().replace("_", "-").replace("-e4m3fn", "").replace("float8", "fp8")
    if key not in SCHEMES:
        raise ValueError(f"qat_scheme: {name!r:.40} is not known, want one of {', '.join(SCHEMES)}")
    if group_size is None:
        return qat(SCHEMES[key]())
    if key not in ("int4", "int8-int4", "cactus"):
        raise ValueError(f"qat_scheme: {key!r} has no groups of {group_size}: leave out group_size")
    return qat(SCHEMES[key](group_size=group_size))
