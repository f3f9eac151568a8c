"""Every training recipe that is registered, called; a new one is in the matrix and among the pickles by itself."""

import dataclasses

import qtorch
from qtorch.recipes.base import RECIPES, Recipe, WeightRecipe
from qtorch.training import fully_quantized
from tests import every_recipe
from tests.every_recipe import is_of_users

# Of recipes that need some.
ARGUMENTS: dict[str, tuple] = {
    "lora_qat": (qtorch.int8_dynamic_activation_int4_weight(group_size=32), 4),
    "mixed_precision_training": (fully_quantized(4, 8),),
    "qat": (qtorch.int8_dynamic_activation_int4_weight(group_size=32),),
    "mxfp4_training": (False, False),  # without noise, so that two runs have the same numbers
    "nvfp4_training": (False, False),
    "scheduled_qat": (qtorch.int8_dynamic_activation_int4_weight(group_size=32),),
    "weight_only_quantized_training": (qtorch.float8_weight_only(),),
}

NAMES = sorted(name for name, c in RECIPES.items() if c.__module__.startswith("qtorch.training.") and name != "convert")
NAMES += sorted(name for name, cls in RECIPES.items() if is_of_users(cls) and not issubclass(cls, WeightRecipe))

IN_CODES = RECIPES["weight_only_quantized_training"]
# Beside the defaults.
VARIANTS: dict[str, Recipe] = {
    "float8_training by blocks": RECIPES["float8_training"](qtorch.PerBlock((32, 32))),
    "qat of int8_weight_only": RECIPES["qat"](qtorch.int8_weight_only()),
    "lsq of int8_weight_only": RECIPES["lsq"](recipe=qtorch.int8_weight_only()),
    "NVFP4 trained in codes": IN_CODES(qtorch.nvfp4_weight_only()),
    "NF4 trained in codes": IN_CODES(qtorch.nf4_weight_only(32, double_quantize=False)),
}


def make(name: str) -> Recipe:
    """The recipe with its defaults, in groups of 32 if it has any."""
    recipe = VARIANTS[name] if name in VARIANTS else RECIPES[name](*ARGUMENTS.get(name, ()))
    if "group_size" in {field.name for field in dataclasses.fields(recipe)}:
        recipe = dataclasses.replace(recipe, group_size=32)
    return recipe


def make_any(name: str) -> Recipe:
    """The same, of recipes for inference too."""
    return make(name) if name in NAMES else every_recipe.make(name, 32)
