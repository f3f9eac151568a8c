"""PlainLayout: one code per element, as the primitives give them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..primitives.scheme import Scheme
from .base import Layout, Plain, register_layout
from .inner_tensors import Form


@register_layout
@dataclass(frozen=True)
class PlainLayout(Layout):
    """Codes in int8 or uint8 (one byte an element, whatever their bits), scale and zero point beside them."""

    name = "plain"
    tensors = ("qdata", "scale", "zero_point")

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        return (Form(scheme.codes_shape, {scheme.weight.dtype.storage}),)

    def pack(self, plain: Plain, scheme: Scheme) -> dict[str, Tensor]:
        codes, scale, zero_point = plain
        tensors = {"qdata": codes, "scale": scale}
        return tensors if zero_point is None else {**tensors, "zero_point": zero_point}

    def unpack(self, tensors: dict[str, Tensor | None], scheme: Scheme) -> Plain:
        return tensors["qdata"], tensors["scale"], tensors["zero_point"]  # type: ignore[return-value]


def layout_for(scheme: Scheme) -> Layout:
    """The layout of the scheme, or the plain one where it cannot hold every such tensor."""
    if not scheme.layout.any_codes:
        return PlainLayout()
    try:
        scheme.layout.check(scheme)
    except ValueError:
        return PlainLayout()
    layout: Layout = scheme.layout
    return layout
