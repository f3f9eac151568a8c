"""Every inference recipe that is registered, called; a new one is in the tests over all of them by itself."""

import dataclasses

from qtorch.recipes.base import RECIPES, Recipe, WeightRecipe

# Of recipes that need some.
ARGUMENTS: dict[str, tuple] = {
    "uintx_weight_only": ("uint3",), "intx_weight_only": ("int5",), "fpx_weight_only": (3, 2),
    "float8_static_activation_float8_weight": (0.01,), "int8_static_activation_int8_weight": (0.03,),
}  # fmt: skip


def make(name: str, group_size: int | None = None) -> WeightRecipe:
    """The recipe with its defaults; in groups of `group_size` if it has any."""
    recipe = RECIPES[name](*ARGUMENTS.get(name, ()))
    if group_size is not None and has_group_size(recipe):
        recipe = dataclasses.replace(recipe, group_size=group_size)
    return recipe


def has_group_size(recipe: WeightRecipe) -> bool:
    """Whether its weights are in groups by default."""
    return getattr(recipe, "group_size", None) is not None


def is_of_users(cls: type[Recipe]) -> bool:
    """Whether a file of a user registered the recipe: neither qtorch, nor a test or a tutorial."""
    return cls.__module__.partition(".")[0] not in ("qtorch", "tests", "tutorials")


K_TYPES = tuple(f"gguf_q{bits}_k" for bits in range(2, 7))
OTHERS = ("block_sparse", "low_rank", *K_TYPES)
"""Have tests of their own, the K types in tests/formats/gguf: they take few shapes, or other recipes."""

NAMES = sorted(
    name
    for name, cls in RECIPES.items()
    if name not in OTHERS
    and (cls.__module__.startswith("qtorch.recipes.") or (is_of_users(cls) and issubclass(cls, WeightRecipe)))
)
FAMILIES = ("int8_weight_only", "int4_weight_only", "int8_dynamic_activation_int8_weight", "nf4_weight_only")
"""Of which a test over all recipes that takes long has one each in its fast part."""

OF_QAT = [name for name in NAMES if not getattr(make(name).linear_spec().weight, "rotation", 0)]
"""Which `qat` takes: rotated weights are not trained."""

WEIGHT_ONLY = [name for name in NAMES if make(name).linear_spec().activation is None]
