"""PortableLayout: codes and scales as operators of other packages take them, for `qtorch.export.portable`.

Kernels for this layout run operators of torch alone. Backends recognize a weight by the operator that reads it, so
that no reshape or cast may stand between the two: a scale per row has one axis, the weight of a convolution has the
shape of the convolution, zero points are int32, in which their difference to a code fits, and scales that are powers of
two are fp32.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..affine import ZeroPointDomain
from ..spec import QuantSpec, Scheme
from .base import Form, Forms, Layout, Plain, register_layout


@register_layout
class PortableLayout(Layout):
    """Codes in their storage dtype, one per element, read by operators of torch alone.

    Args:
        qdq: compute products with quantized activations as backends recognize them: both operands dequantized, then a
            product in floating point. Otherwise the codes are multiplied, as the other kernels do.
        input_scale, input_zero_point: those of a static activation with one scale, as numbers, which such backends ask
            for; read if `qdq`.
        shape: the shape in which codes are stored; None for their own. That of a convolution is (N, C, *kernel), its
            codes being a matrix (N, T * C) otherwise.
    """

    name = "portable"
    traces_views = True

    qdq: bool = False
    input_scale: float | None = None
    input_zero_point: int = 0
    shape: tuple[int, ...] | None = None

    @property
    def whole_convolutions(self) -> bool:
        return self.qdq and self.input_scale is not None

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        return (Form(self.shape or scheme.codes_shape, {scheme.weight.dtype.storage}),)

    def forms(self, scheme: Scheme) -> Forms:
        forms = dict(super().forms(scheme))
        if self._adds_zero_point(scheme):
            forms["zero_point"] = (Form(forms["scale"][0].shape, {torch.int8}),)
        if is_per_row(scheme):
            rows = (scheme.codes_shape[0],)
            forms |= {name: (Form(rows, forms[name][0].dtypes),) for name in ("scale", "zero_point") if name in forms}
        return forms

    def pack(self, plain: Plain, scheme: Scheme) -> dict[str, torch.Tensor]:
        codes, scale, zero_point = plain
        if self.shape is not None:
            n, channels, *kernel = self.shape
            codes = codes.reshape(n, *kernel, channels).movedim(-1, 1).contiguous()
        if zero_point is None and self._adds_zero_point(scheme):
            zero_point = torch.zeros_like(scale, dtype=torch.int8)
        elif zero_point is not None and scheme.weight.zero_point_domain is ZeroPointDomain.INT:
            zero_point = zero_point.to(torch.int32)
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.float()
        tensors = {"qdata": codes, "scale": scale, "zero_point": zero_point}
        if is_per_row(scheme):
            tensors |= {name: t.reshape(-1) for name, t in tensors.items() if name != "qdata" and t is not None}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def unpack(self, tensors: Mapping[str, Any], scheme: Scheme) -> Plain:
        codes, scale, zero_point = (tensors[name] for name in self.tensors)
        if self.shape is not None:
            codes = codes.movedim(1, -1).flatten(1)
        if not scheme.weight.has_zero_point:
            zero_point = None
        if zero_point is not None and scheme.weight.zero_point_domain is ZeroPointDomain.INT:
            zero_point = zero_point.to(scheme.weight.dtype.storage)
        if is_per_row(scheme):
            scale, zero_point = scale.reshape(-1, 1), None if zero_point is None else zero_point.reshape(-1, 1)
        return codes, scale, zero_point

    def _adds_zero_point(self, scheme: Scheme) -> bool:
        """Whether zeros are stored as zero points: backends that fuse operators ask for some."""
        weight = scheme.weight
        plain = isinstance(weight, QuantSpec) and weight.scale_spec is None and not weight.dtype.is_floating_point
        return self.qdq and plain and not weight.has_zero_point


def is_per_row(scheme: Scheme) -> bool:
    """Whether the codes are a matrix with a scale per row, which is stored as it is."""
    weight, shape = scheme.weight, scheme.codes_shape
    if not isinstance(weight, QuantSpec) or weight.scale_spec is not None or len(shape) != 2:
        return False
    return weight.block_size(shape) == (1, shape[1])
