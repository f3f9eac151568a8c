"""Recipes that look at data, one algorithm a file: see `statistics` for what they may ask for.

    quantize_(model, importance_weighted(lut_weight_only(bits=3), batches))

Every module of this package is imported here, and every recipe it registers becomes a name of this package and of
`qtorch`: an algorithm is added by adding its file.
"""

from ..discovery import import_modules

import_modules(__name__, __path__)

from ..recipe import RECIPES  # noqa: E402

__all__ = sorted(name for name, cls in RECIPES.items() if cls.__module__.startswith(f"{__name__}."))

globals().update({name: RECIPES[name] for name in __all__})
