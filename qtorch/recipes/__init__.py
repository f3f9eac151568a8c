"""Recipes for inference, one a file.

Every module of this package is imported here, and every recipe it registers becomes a name of this package and of
`qtorch`: a recipe is added by adding its file.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from ..recipe import RECIPES  # noqa: E402

globals().update(RECIPES)

__all__ = sorted(RECIPES)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
