"""Recipes for inference, one a file. Every module of this package is imported here, and so registered."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from .int4_weight_only import Int4WeightOnly, int4_weight_only  # noqa: E402
from .int8_dynamic_activation_int4_weight import (  # noqa: E402
    Int8DynamicActivationInt4Weight,
    int8_dynamic_activation_int4_weight,
)
from .int8_dynamic_activation_int8_weight import (  # noqa: E402
    Int8DynamicActivationInt8Weight,
    int8_dynamic_activation_int8_weight,
)
from .int8_weight_only import Int8WeightOnly, int8_weight_only  # noqa: E402

__all__ = [
    "Int4WeightOnly",
    "Int8DynamicActivationInt4Weight",
    "Int8DynamicActivationInt8Weight",
    "Int8WeightOnly",
    "int4_weight_only",
    "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_int8_weight",
    "int8_weight_only",
]
