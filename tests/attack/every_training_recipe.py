"""Every training recipe that is registered, called; a new one is in the tests over all of them by itself."""

from typing import Any

import qtorch.training
from qtorch.quantize_api import RECIPES, Recipe

# Of recipes that need some.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "qat": (qtorch.int8_dynamic_activation_int8_weight(),),
    "lora_qat": (qtorch.int4_weight_only(group_size=32), 4),
    "scheduled_qat": (qtorch.int8_dynamic_activation_int4_weight(group_size=32),),
    "lsq": (8, 8),
}


def make(name: str) -> Recipe:
    """The recipe with its defaults."""
    return RECIPES[name](*ARGUMENTS.get(name, ()))


TRAINING = sorted(
    name for name, cls in RECIPES.items() if cls.__module__.startswith("qtorch.training.") and name != "convert"
)
