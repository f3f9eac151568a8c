"""Recipes that use calibration data, one algorithm per file; `statistics` lists what they can request.

    quantize_(model, importance_weighted(lut_weight_only(bits=3), batches))

Every module of this package is imported here, and every recipe it registers becomes a name of this package and of
`qtorch`, so adding a file adds an algorithm.
"""

from ..discovery import import_modules

import_modules(__name__, __path__)

from ..recipe import RECIPES  # noqa: E402

__all__ = sorted(name for name, cls in RECIPES.items() if cls.__module__.startswith(f"{__name__}."))

globals().update({name: RECIPES[name] for name in __all__})
