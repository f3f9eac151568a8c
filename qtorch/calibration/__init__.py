"""Recipes that use calibration data, one algorithm per file; `statistics` lists what they can request.

    quantize_(model, gptq(int4_weight_only(), batches))
    quantize_(model, observed(int8_static_activation_int8_weight(), batches))

Every module of this package is imported here, and every recipe it registers becomes a name of this package and of
`qtorch`, so adding a file adds an algorithm.
"""

from ..primitives.discovery import import_modules

import_modules(__name__, __path__)

from ..recipes.base import RECIPES  # noqa: E402
from .calibrated import (
    auto,
    gptq,
    observed,
)
from .observers import OBSERVER_NAMES, OBSERVERS, Observer  # noqa: E402
from .rounding import (  # noqa: E402
    AutoRound,
    Descent,
    FloatTarget,
    Gptq,
    Nearest,
    Rounding,
    ScaleRefit,
    ScaleSearch,
    four_over_six,
)
from .transforms import Awq, Clip, Rotate, Smooth, Transform, awq, clip, rotate, smooth  # noqa: E402

RECIPE_NAMES = sorted(name for name, cls in RECIPES.items() if cls.__module__.startswith(f"{__name__}."))

__all__ = [
    "AutoRound",
    "Awq",
    "Clip",
    "Descent",
    "FloatTarget",
    "Gptq",
    "Nearest",
    "Observer",
    "Rotate",
    "Rounding",
    "ScaleRefit",
    "ScaleSearch",
    "Smooth",
    "Transform",
    "auto",
    "awq",
    "clip",
    "four_over_six",
    "gptq",
    "observed",
    "rotate",
    "smooth",
    *OBSERVER_NAMES,
    *RECIPE_NAMES,
]

globals().update({name: RECIPES[name] for name in RECIPE_NAMES})
globals().update({name: OBSERVERS[name] for name in OBSERVER_NAMES})
