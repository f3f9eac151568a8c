"""AffineQuantizedTensor: a tensor stored as codes with scales and zero points.

    w = (codes - zero_point) * scale            (see `primitives.affine` for the other domains)

The layout defines how codes, scales and zero points are stored; the `LinearSpec` also says how the activation is
quantized. A static activation scale is one more inner tensor, `act_scale`. With double quantization (see
`primitives.double_quant`) the scales have scales of their own, `scale_scale`, and zero points that are quantized too
have `zero_point_scale`; views and slices of such a tensor hold the same numbers, dequantized to fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.ops.quantize import quantize_weight
from ..primitives import LinearSpec, QuantSpec, Scheme, double_quant
from ..primitives.affine import check_floating_point
from ..primitives.layouts.base import FLOATS, INTEGERS, Form, Forms, Plain, check_inner_tensors
from .base import QuantizedTensor, with_dense_scales

_BESIDE_LAYOUT = ("scale_scale", "scale_mean", "zero_point_scale", "act_scale", "act_zero_point")
"""Inner tensors that are the same in every layout; None if the scheme does not have them."""


class AffineQuantizedTensor(QuantizedTensor):
    """A tensor stored as codes with scales and zero points. Make one with `from_float` or `from_plain`.

    For a tensor of shape S in blocks of shape B, codes have shape S, scale and zero_point have shape S / B.
    """

    spec_type = QuantSpec
    per_block = "zero_point"

    zero_point: Tensor | None
    scale_mean: Tensor | None
    zero_point_scale: Tensor | None
    act_scale: Tensor | None
    act_zero_point: Tensor | None

    @classmethod
    def tensor_names(cls, scheme: Scheme) -> tuple[str, ...]:
        names: tuple[str, ...] = scheme.layout.tensors
        return (*names, *_BESIDE_LAYOUT)

    @classmethod
    def _forms_beside_layout(cls, scheme: Scheme) -> Forms:
        """Forms of a static activation: one scale for the activation, or one per block of its last axis."""
        activation = scheme.activation
        if not scheme.spec.static or activation is None:
            return {}
        shape = activation.scale_shape((1, *(scheme.codes_shape[-1:] or (1,))))
        forms = {"act_scale": (Form(shape, FLOATS),)}
        if activation.has_zero_point:
            forms["act_zero_point"] = (Form(shape, FLOATS if activation.zero_point_domain.is_real else INTEGERS),)
        return forms

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
            spec: how to quantize; a `QuantSpec` alone is a weight-only `LinearSpec` in the plain layout.
            act_scale, act_zero_point: of a static activation.

        Raises:
            ValueError: a block does not divide the shape, or a static spec has no `act_scale`.
            TypeError: `input` is not in floating point.
        """
        check_floating_point("from_float", input)
        linear = cls.complete(spec)
        weight = linear.weight
        with torch.no_grad():
            if weight.scale_spec is None:
                codes, scale, zero_point = quantize_weight(input, weight)
                stored = {"scale": scale}
            else:
                stored, zero_point = weight.choose_stored_qparams(input)
                codes = weight.quantize(input, *weight.dense_qparams(stored, zero_point))
            others = {"zero_point": zero_point, "act_scale": act_scale, "act_zero_point": act_zero_point}
            return cls._from_codes(codes.contiguous(), {**stored, **others}, linear, input.dtype)

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
        """Wrap existing codes, scales and zero points, which are not quantized, even if the spec has a `scale_spec`.

        Args:
            codes: in the storage dtype of the spec.
            scale, zero_point: one element per block, with as many axes as `codes`.
            dtype: logical dtype.

        Raises:
            ValueError: a shape or dtype does not fit the spec.
        """
        linear = with_dense_scales(cls.complete(spec))
        others = {"scale": scale, "zero_point": zero_point, "act_scale": act_scale, "act_zero_point": act_zero_point}
        return cls._from_codes(codes, others, linear, dtype)

    def plain(self) -> Plain:
        codes, scale, zero_point = self._unpacked()
        if self.scale_scale is None:
            return codes, scale, zero_point
        return codes, self.dense_scale(), zero_point if self.zero_point_scale is None else self.dense_zero_point()

    def _unpacked(self) -> Plain:
        """`plain` with the scale in its stored form, which may be quantized."""
        layout = self.scheme.layout
        return layout.unpack({name: getattr(self, name) for name in layout.tensors}, self.scheme)

    def dense_zero_point(self, rows: Tensor | None = None) -> Tensor | None:
        """The zero point, of the given rows of blocks or of all, in layouts that store it as a tensor."""
        zero_point = self.zero_point
        if self.zero_point_scale is not None:
            spec: Any = self.scheme.weight.scale_spec
            return double_quant.dequantize_zero_point(self.inner_tensors, spec, rows)
        return zero_point if zero_point is None or rows is None else zero_point.index_select(0, rows)

    def with_plain(self, plain: Plain, spec: LinearSpec | None = None) -> AffineQuantizedTensor:
        activation = (self.act_scale, self.act_zero_point)
        return type(self).from_plain(*plain, spec or self.scheme.spec, self.scheme.dtype, *activation)

    def canonical(self) -> tuple[Tensor, dict[str, Tensor]]:
        codes, scale, zero_point = self._unpacked()
        others = {"scale": scale, "zero_point": zero_point, **{name: getattr(self, name) for name in _BESIDE_LAYOUT}}
        return codes, {name: tensor for name, tensor in others.items() if tensor is not None}

    def scales(self) -> tuple[Tensor, Tensor | None]:
        if self.scheme.layout.packed_axis is None:
            return self.plain()[1:]
        return self.dense_scale(), self.dense_zero_point()

    def moved(
        self, device: torch.device, move: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> AffineQuantizedTensor:
        layout = self.scheme.layout
        # On the meta device there is no data to repack.
        if "meta" in (device.type, self.device.type) or layout.packing(device) == layout.packing(self.device):
            return super().moved(device, move, dtype)
        codes, others = self.canonical()
        moved = {name: move(tensor) for name, tensor in others.items()}
        return type(self).from_canonical(move(codes), moved, replace(self.scheme, dtype=dtype))

    def _pickled(self) -> dict[str, Tensor]:
        if self.scheme.layout.packing(self.device) is None:
            return self.inner_tensors
        codes, others = self.canonical()
        return {"codes": codes, **others}

    @classmethod
    def _from_pickled(cls, tensors: dict[str, Tensor], scheme: Scheme) -> AffineQuantizedTensor:
        if "codes" not in tensors:
            return super()._from_pickled(tensors, scheme)
        others = {name: tensor for name, tensor in tensors.items() if name != "codes"}
        return cls.from_canonical(tensors["codes"], others, scheme)

    def with_activation(
        self, activation: QuantSpec | None, act_scale: Tensor | None = None, act_zero_point: Tensor | None = None
    ) -> AffineQuantizedTensor:
        """The same weight, with its input quantized by `activation`: statically if `act_scale` is given."""
        if activation is act_scale is self.scheme.activation is None:
            return self
        spec = replace(self.scheme.spec, activation=activation, static=act_scale is not None)
        scheme, given = replace(self.scheme, spec=spec), {"act_scale": act_scale, "act_zero_point": act_zero_point}
        check_inner_tensors(given, self._forms_beside_layout(scheme), scheme)
        return type(self)({**self.inner_tensors, **given}, scheme)
