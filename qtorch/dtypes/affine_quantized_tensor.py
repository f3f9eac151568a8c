"""AffineQuantizedTensor: a tensor stored as codes with scales and zero points.

    w = (codes - zero_point) * scale            (see `primitives.affine` for the other domains)

Its layout says how codes, scales and zero points lie in memory; its `LinearSpec` also says how it wants the activation
that it meets quantized. A static activation scale is one more inner tensor, `act_scale`.
"""

from __future__ import annotations

from collections.abc import Callable
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

    spec_type = QuantSpec

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
        linear.layout.check(scheme)
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

    def with_packed(self, qdata: Tensor, scale: Tensor, other: Tensor | None, scheme: Scheme) -> AffineQuantizedTensor:
        """`with_plain` from codes that are packed for the layout of `scheme`; `other` is the zero point."""
        names = (*scheme.layout.tensors, "act_scale", "act_zero_point")
        values = (qdata, scale, other, self.act_scale, self.act_zero_point)
        return type(self)(dict(zip(names, values, strict=True)), scheme)

    def quantized_like(self, source: Tensor) -> AffineQuantizedTensor:
        """`source` with the spec, scale dtype, activation and layout of this tensor."""
        spec = self.scheme.spec
        activation = (self.act_scale, self.act_zero_point)
        make = type(self).from_plain
        if isinstance(source, AffineQuantizedTensor) and source.scheme.weight == spec.weight:
            return make(*source.plain(), spec, source.scheme.dtype, *activation)
        values = source.dequantize() if isinstance(source, QuantizedTensor) else source
        values = values.to(self.device, self.scheme.dtype)
        # The codes are those for the scale as it will be stored: after .to(dtype), not what the spec would choose now.
        weight = replace(spec.weight, scale_dtype=self.scales()[0].dtype)
        scale, zero_point = weight.choose_qparams(values)
        return make(weight.quantize(values, scale, zero_point), scale, zero_point, spec, values.dtype, *activation)

    def canonical(self) -> tuple[Tensor, dict[str, Tensor]]:
        """(codes, the other tensors by name) as they are saved."""
        codes, scale, zero_point = self.plain()
        others = {"scale": scale, "zero_point": zero_point}
        others |= {"act_scale": self.act_scale, "act_zero_point": self.act_zero_point}
        return codes, {name: tensor for name, tensor in others.items() if tensor is not None}

    @classmethod
    def from_canonical(cls, codes: Tensor, others: dict[str, Tensor], scheme: Scheme) -> AffineQuantizedTensor:
        """Inverse of `canonical`."""
        names = ("scale", "zero_point")
        scale, zero_point = (others.get(name) for name in names)
        if scale is None:
            raise KeyError("scale")
        activation = (others.get("act_scale"), others.get("act_zero_point"))
        return cls.from_plain(codes, scale, zero_point, scheme.spec, scheme.dtype, *activation)

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """(scale, zero_point), without unpacking codes where that can be avoided."""
        if self.scheme.layout.packed_axis is None:
            return self.plain()[1:]
        return self.scale, self.zero_point  # type: ignore[attr-defined]

    def moved(
        self, device: torch.device, move: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> AffineQuantizedTensor:
        layout = self.scheme.layout
        # The meta device has no data to pack otherwise.
        if "meta" in (device.type, self.device.type) or layout.packing(device) == layout.packing(self.device):
            return super().moved(device, move, dtype)
        plain = replace(self.scheme.spec, layout=PlainLayout())
        moved = self.with_plain(self.plain(), plain).map_inner(move)
        return type(self).from_plain(*moved.plain(), self.scheme.spec, dtype, moved.act_scale, moved.act_zero_point)

    def _pickled(self) -> dict[str, Tensor]:
        if self.scheme.layout.packing(self.device) is None:
            return self.inner_tensors
        codes, others = self.canonical()
        return {"codes": codes, **others}

    @classmethod
    def _from_pickled(cls, tensors: dict[str, Tensor], scheme: Scheme) -> AffineQuantizedTensor:
        if "codes" not in tensors:
            return cls(tensors, scheme)
        others = {name: tensor for name, tensor in tensors.items() if name != "codes"}
        return cls.from_canonical(tensors["codes"], others, scheme)

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
        # A compiler that traces, and logs what it does, has symbols for sizes; they take no format.
        size = f"{self.nbytes:,}" if isinstance(self.nbytes, int) else str(self.nbytes)
        return (
            f"{type(self).__name__}({scheme.spec}, layout={scheme.layout}, shape={scheme.shape}, "
            f"dtype={scheme.dtype}, device={self.device}, {size} bytes{grad})"
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
