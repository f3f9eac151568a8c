"""Layout: how the codes, scales and zero points of a quantized tensor lie in memory.

A layout is a stateless bijection, ``unpack(pack(codes, scale, zero_point)) == (codes, scale, zero_point)`` exactly, and
knows no operations. A new layout is one file in this folder: a frozen dataclass with a name of its own, decorated with
`register_layout`.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from torch import Tensor

from ...primitives.jsonable import jsonable
from ...primitives.scheme import Scheme

Plain = tuple[Tensor, Tensor, Tensor | None]
"""(codes in their storage dtype, scale, zero point or None), unpacked."""


class Layout:
    """Base of the layouts.

    Attributes:
        name: what kernels ask for.
        tensors: names of the inner tensors that `pack` gives; those it leaves out are None.
    """

    name: ClassVar[str]
    tensors: ClassVar[tuple[str, ...]]

    def pack(self, plain: Plain, scheme: Scheme) -> dict[str, Tensor]:
        """Inner tensors by name."""
        raise NotImplementedError

    def unpack(self, tensors: dict[str, Tensor | None], scheme: Scheme) -> Plain:
        """Inverse of `pack`; every name of `tensors` is present."""
        raise NotImplementedError


L = TypeVar("L", bound=type[Layout])

LAYOUTS: dict[str, type[Layout]] = {}


def register_layout(cls: L) -> L:
    """Class decorator: make a layout known by its name and readable from JSON.

    Raises:
        ValueError: another layout has the name.
    """
    if LAYOUTS.setdefault(cls.name, cls) is not cls:
        raise ValueError(f"register_layout: the name {cls.name!r} is taken by {LAYOUTS[cls.name]!r}")
    jsonable(cls)
    return cls
