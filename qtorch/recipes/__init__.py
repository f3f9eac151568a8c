"""Recipes for inference, one per file.

Every module of this package is imported here, and every recipe it registers becomes a name of this package and of
`qtorch`, so adding a file adds a recipe.
"""

from ..primitives.discovery import import_modules

import_modules(__name__, __path__)

from .base import RECIPES  # noqa: E402

__all__ = sorted(name for name, cls in RECIPES.items() if cls.__module__.startswith(f"{__name__}."))

globals().update({name: RECIPES[name] for name in __all__})
