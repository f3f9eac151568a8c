"""Layouts, one per file. Every module of this package is imported here."""

from ..discovery import import_modules

import_modules(__name__, __path__)

from .base import LAYOUTS, Layout, register_layout  # noqa: E402
from .block_sparse import BlockSparseLayout  # noqa: E402
from .packed import PackedLayout  # noqa: E402
from .plain import PlainLayout  # noqa: E402
from .semi_sparse import SemiSparseLayout  # noqa: E402
from .tensor_core_tiled import TensorCoreTiledLayout  # noqa: E402

__all__ = [
    "LAYOUTS",
    "BlockSparseLayout",
    "Layout",
    "PackedLayout",
    "PlainLayout",
    "SemiSparseLayout",
    "TensorCoreTiledLayout",
    "register_layout",
]
