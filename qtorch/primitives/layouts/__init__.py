"""Layouts, one per file. Every module of this package is imported here."""

from ..discovery import import_modules

import_modules(__name__, __path__)

from .base import FLOATS, INTEGERS, LAYOUTS, Form, Forms, Layout, Plain, register_layout  # noqa: E402, F401
from .block_sparse import BlockSparseLayout  # noqa: E402
from .packed import PackedLayout, can_pack_bits, pack_codes, packed_length, unpack_codes  # noqa: E402, F401
from .plain import PlainLayout, layout_for, smallest_layout  # noqa: E402, F401
from .semi_sparse import SemiSparseLayout  # noqa: E402
from .tensor_core_tiled import TensorCoreTiledLayout  # noqa: E402
from .vector_codebook import VectorCodebookLayout  # noqa: E402

__all__ = [
    "LAYOUTS", "BlockSparseLayout", "Layout", "PackedLayout", "PlainLayout", "SemiSparseLayout",
    "TensorCoreTiledLayout", "VectorCodebookLayout", "register_layout",
]  # fmt: skip
