"""AffineQuantizedTensor: a tensor stored as codes with scales and zero points.

    w = (codes - zero_point) * scale            (see `primitives.affine` for the other domains)

Its layout says how codes, scales and zero points lie in memory; its `LinearSpec` also says how it wants the activation
that it meets quantized. A static activation scale is one more inner tensor, `act_scale`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..primitives.scheme import Scheme
from ..primitives.spec import LinearSpec, QuantSpec
from .base import QuantizedTensor
from .layouts import Layout, PlainLayout
from .layouts.base import Plain


class AffineQuantizedTensor(QuantizedTensor):
    """See the top of the file. Make one with `from_float` or `from_plain`.

    Invariants, for a tensor of shape S in blocks of B: codes have shape S; scale and zero_point have shape S / B.
    """

    act_scale: Tensor | None
    act_zero_point: Tensor | None

    @classmethod
    def tensor_names(cls, scheme: Scheme) -> tuple[str, ...]:
        names: tuple[str, ...] = scheme.layout.tensors
        return (*names, "act_scale", "act_zero_point")

    @classmethod
    def from_float(
        cls,
        input: Tensor,
        spec: LinearSpec | QuantSpec,
        act_scale: Tensor | None = None,
        act_zero_point: Tensor | None = None,
    ) -> AffineQuantizedTensor:
        """Quantize `input` (any shape; fp32, fp16 or bf16), which also gives the logical dtype.

        Args:
            spec: how; a bare `QuantSpec` is a weight-only `LinearSpec` in the plain layout.
            act_scale, act_zero_point: of a static activation.

        Raises:
            ValueError: a block does not divide the shape; a static spec without its scale.
            TypeError: `input` is not in floating point.
        """
        if not input.is_floating_point():
            raise TypeError(f"from_float takes a floating-point tensor, got {input.dtype}")
        linear = spec if isinstance(spec, LinearSpec) else LinearSpec(spec)
        with torch.no_grad():
            scale, zero_point = linear.weight.choose_qparams(input)
            codes = linear.weight.quantize(input, scale, zero_point)
            return cls.from_plain(codes, scale, zero_point, linear, input.dtype, act_scale, act_zero_point)

    @classmethod
    def from_plain(
        cls,
        codes: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        spec: LinearSpec | QuantSpec,
        dtype: torch.dtype,
        act_scale: Tensor | None = None,
        act_zero_point: Tensor | None = None,
    ) -> AffineQuantizedTensor:
        """Wrap codes that are already there.

        Args:
            codes: in the storage dtype of the spec.
            scale, zero_point: one element per block, of the rank of codes.
            dtype: logical dtype.

        Raises:
            ValueError: a shape or dtype does not fit the spec.
        """
        linear = spec if isinstance(spec, LinearSpec) else LinearSpec(spec)
        if linear.layout is None:
            linear = replace(linear, layout=PlainLayout())
        weight = linear.weight
        if codes.dtype != weight.dtype.storage:
            raise ValueError(f"codes of {weight.dtype} are stored as {weight.dtype.storage}, got {codes.dtype}")
        wanted = weight.scale_shape(codes.shape)
        for what, tensor in (("scale", scale), ("zero_point", zero_point)):
            if tensor is not None and tuple(tensor.shape) != wanted:
                raise ValueError(f"{what} of codes {tuple(codes.shape)} has shape {wanted}, got {tuple(tensor.shape)}")
        if (zero_point is not None) != weight.has_zero_point:
            raise ValueError(f"zero_point is {'missing' if zero_point is None else 'given'}, the spec is {weight}")
        _check_activation(linear, act_scale, act_zero_point)
        scheme = Scheme(linear, tuple(codes.shape), dtype)
        packed = linear.layout.pack((codes, scale, zero_point), scheme)
        return cls({**packed, "act_scale": act_scale, "act_zero_point": act_zero_point}, scheme)

    def plain(self) -> Plain:
        """(codes, scale, zero_point), unpacked; zero_point None where it is always zero."""
        layout = self.scheme.layout
        return layout.unpack({name: getattr(self, name) for name in layout.tensors}, self.scheme)

    def with_plain(self, plain: Plain, spec: LinearSpec | None = None) -> AffineQuantizedTensor:
        """Other codes in the same layout, logical dtype and activation."""
        codes, scale, zero_point = plain
        spec = spec or self.scheme.spec
        return type(self).from_plain(
            codes, scale, zero_point, spec, self.scheme.dtype, self.act_scale, self.act_zero_point
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain float tensor, in the logical dtype unless `dtype` is given."""
        return self.scheme.weight.dequantize(*self.plain(), dtype or self.scheme.dtype)

    def to_layout(self, layout: Layout) -> AffineQuantizedTensor:
        """The same numbers in another layout."""
        return self.with_plain(self.plain(), replace(self.scheme.spec, layout=layout))

    def with_activation(
        self,
        activation: QuantSpec | None,
        act_scale: Tensor | None = None,
        act_zero_point: Tensor | None = None,
    ) -> AffineQuantizedTensor:
        """The same weight, asking for its input to be quantized by `activation`: static if `act_scale` is given."""
        spec = replace(self.scheme.spec, activation=activation, static=act_scale is not None)
        _check_activation(spec, act_scale, act_zero_point)
        weight = {name: getattr(self, name) for name in self.scheme.layout.tensors}
        tensors = {**weight, "act_scale": act_scale, "act_zero_point": act_zero_point}
        return type(self)(tensors, replace(self.scheme, spec=spec))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        scheme = self.scheme
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{type(self).__name__}({scheme.spec}, layout={scheme.layout}, shape={scheme.shape}, "
            f"dtype={scheme.dtype}, device={self.device}, {self.nbytes:,} bytes{grad})"
        )


def _check_activation(spec: LinearSpec, act_scale: Tensor | None, act_zero_point: Tensor | None) -> None:
    if not spec.static and act_scale is None and act_zero_point is None:
        return
    wanted = {
        "act_scale": (act_scale, spec.static),
        "act_zero_point": (
            act_zero_point,
            spec.static and spec.activation is not None and spec.activation.has_zero_point,
        ),
    }
    for name, (tensor, needed) in wanted.items():
        if (tensor is not None) != needed:
            raise ValueError(f"{name} is {'missing' if needed else 'given'}, the spec has {spec}")
