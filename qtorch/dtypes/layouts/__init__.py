"""Layouts, one a file. Every module of this package is imported here."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from .base import LAYOUTS, Layout, register_layout  # noqa: E402
from .packed import PackedLayout  # noqa: E402
from .plain import PlainLayout  # noqa: E402
from .semi_sparse import SemiSparseLayout  # noqa: E402
from .tensor_core_tiled import TensorCoreTiledLayout  # noqa: E402

__all__ = [
    "LAYOUTS",
    "Layout",
    "PackedLayout",
    "PlainLayout",
    "SemiSparseLayout",
    "TensorCoreTiledLayout",
    "register_layout",
]
