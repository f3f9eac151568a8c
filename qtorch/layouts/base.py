"""Layout: how the codes, scales and zero points of a quantized tensor lie in memory.

A layout is a stateless bijection, ``unpack(pack(codes, scale, zero_point)) == (codes, scale, zero_point)`` exactly, and
knows no operations. A new layout is one file in this folder: a frozen dataclass with a name of its own, decorated with
`register_layout`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..primitives.affine import ZeroPointDomain
from ..primitives.jsonable import jsonable
from ..primitives.scheme import Scheme
from ..primitives.spec import QuantSpec
from .inner_tensors import FLOATS, INTEGERS, Form, Forms, scale_forms

Plain = tuple[Tensor, Tensor, Tensor | None]
"""(codes in their storage dtype, scale, zero point or None), unpacked."""


class Layout:
    """Base of the layouts.

    Attributes:
        name: what kernels ask for.
        tensors: names of the inner tensors that `pack` gives; those it leaves out are None.
        any_codes: it holds whatever codes a scheme that it takes can have. Otherwise a view that has to unpack them is
            in the plain layout.
    """

    name: ClassVar[str]
    tensors: ClassVar[tuple[str, ...]]
    any_codes: ClassVar[bool] = True

    def pack(self, plain: Plain, scheme: Scheme) -> dict[str, Tensor]:
        """Inner tensors by name."""
        raise NotImplementedError

    def unpack(self, tensors: dict[str, Tensor | None], scheme: Scheme) -> Plain:
        """Inverse of `pack`; every name of `tensors` is present."""
        raise NotImplementedError

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        """What the tensor named first must be: the packed codes of a tensor of this scheme."""
        raise NotImplementedError

    def forms(self, scheme: Scheme) -> Forms:
        """What each tensor that `pack` gives must be. By default scales and zero points are beside the codes."""
        weight, shape = scheme.weight, scheme.codes_shape
        forms = {self.tensors[0]: self.codes_forms(scheme), **scale_forms(weight, shape)}
        if weight.has_zero_point:
            dtypes = FLOATS if weight.zero_point_domain is ZeroPointDomain.FLOAT else INTEGERS
            forms["zero_point"] = (Form(weight.scale_shape(shape), dtypes),)
        return forms

    def check_spec(self, weight: QuantSpec) -> None:
        """Raise `ValueError` where no tensor quantized so can be laid out so; every one can by default."""

    def check(self, scheme: Scheme) -> None:
        """Raise `ValueError` where a tensor of this scheme cannot be laid out so."""
        self.check_spec(scheme.weight)

    def packing(self, device: torch.device) -> Hashable:
        """What the packed form depends on beside the scheme, None for nothing: tensors move to a device of another
        packing by unpacking, and are pickled unpacked."""
        return None

    @property
    def packed_axis(self) -> int | None:
        """The axis, counted from the end, that the tensor named first is packed along; along all others it can be cut
        and moved as the codes can, with the other tensors as they are in the plain layout. None: it cannot."""
        return None

    def can_view(self, qdata: Tensor) -> bool:
        """Whether this tensor, the one named first, does lie along `packed_axis`: the packing of a device may not."""
        return self.packed_axis is not None

    def with_packed_axis(self, axis: int) -> Layout:
        """The layout of such a tensor after the packed axis has moved."""
        raise NotImplementedError


L = TypeVar("L", bound=type[Layout])

LAYOUTS: dict[str, type[Layout]] = {}


def check_layout(value: object) -> None:
    """Raise `ValueError` where `value`, from a file say, is no layout."""
    if type(value) not in LAYOUTS.values():
        raise ValueError(f"a layout is one of {', '.join(cls.__name__ for cls in LAYOUTS.values())}, got {value!r:.80}")


def register_layout(cls: L) -> L:
    """Class decorator: make a layout known by its name and readable from JSON.

    Raises:
        ValueError: another layout has the name.
    """
    if LAYOUTS.setdefault(cls.name, cls) is not cls:
        raise ValueError(f"register_layout: the name {cls.name!r} is taken by {LAYOUTS[cls.name]!r}")
    jsonable(cls)
    return cls


def check_scheme(scheme: Scheme, spec_type: type) -> None:
    """Raise `ValueError` where a scheme has a weight that is not described by a `spec_type`, or cannot be laid out as
    it says."""
    if not isinstance(scheme.weight, spec_type):
        raise ValueError(f"takes a {spec_type.__name__}, got {scheme.weight!r}")
    if not isinstance(scheme.layout, Layout):
        raise ValueError(f"takes a layout such as PlainLayout(), got {scheme.layout!r}")
    if any(size < 0 for size in scheme.shape):
        raise ValueError(f"takes a shape without negative sizes, got {scheme.shape}")
    scheme.layout.check(scheme)
