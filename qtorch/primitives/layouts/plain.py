"""PlainLayout: unpacked codes, scale and zero point, as the primitives return them."""

from ..qdtype import QDType
from ..spec import Scheme
from .base import Form, Layout, register_layout
from .packed import PackedLayout, can_pack_bits


@register_layout
class PlainLayout(Layout):
    """Unpacked codes in their storage dtype, one per element, with scale and zero point as separate tensors."""

    name = "plain"

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        return (Form(scheme.codes_shape, {scheme.weight.dtype.storage}),)

    def joins_rows(self, ndim: int) -> bool:
        return True


def smallest_layout(dtype: QDType) -> Layout:
    """The layout in which codes of this type take the fewest bytes: packed to their true size if they have any."""
    return PackedLayout() if can_pack_bits(dtype) else PlainLayout()


def layout_for(scheme: Scheme) -> Layout:
    """The layout of the scheme, or the plain layout if it cannot hold every tensor of the scheme."""
    if not scheme.layout.any_codes:
        return PlainLayout()
    try:
        scheme.layout.check(scheme)
    except ValueError:
        return PlainLayout()
    layout: Layout = scheme.layout
    return layout
