"""LUTQuantizedTensor: a tensor stored as indices into look-up tables.

    w = table[codes] * scale            (see `primitives.codebook`)

One table is shared (NF4) or each block has its own (k-means). With double quantization the scales are quantized too
(see `primitives.double_quant`); views and slices of such a tensor hold the same scales, dequantized to fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..primitives.codebooks import NF4_TABLE, CodebookSpec
from ..primitives.double_quant import dequantize_scale, quantize_scale
from ..primitives.granularity import PerGroup
from ..primitives.layouts import Layout, PackedLayout, PlainLayout
from ..primitives.layouts.base import FLOATS, Form, Forms, check_inner_tensors, check_scheme
from ..primitives.layouts.packed import can_pack_bits
from ..primitives.qdtype import qdtype
from ..primitives.spec import LinearSpec, QuantSpec, Scheme
from .base import QuantizedTensor

_TENSORS = ("qdata", "scale", "table", "scale_scale", "scale_mean")


class LUTQuantizedTensor(QuantizedTensor):
    """A tensor stored as indices into look-up tables. Make one with `from_float` or `from_plain`.

    Attributes:
        qdata: codes in the form of the layout: packed to their true size along one axis, or one byte each.
        scale: one element per block; quantized if `scale_scale` and `scale_mean` are not None.
        table: (L,), or one per block, (*scale.shape, L).
    """

    spec_type = CodebookSpec

    qdata: Tensor
    scale: Tensor
    table: Tensor
    scale_scale: Tensor | None
    scale_mean: Tensor | None

    @classmethod
    def tensor_names(cls, scheme: Scheme) -> tuple[str, ...]:
        return _TENSORS

    @classmethod
    def forms(cls, scheme: Scheme) -> Forms:
        check_scheme(scheme, CodebookSpec)
        if scheme.activation is not None:
            raise ValueError(f"a look-up table has no product with quantized activations, got {scheme.spec}")
        return {**scheme.layout.forms(scheme), "table": _table_form(scheme)}

    @classmethod
    def from_float(
        cls, input: Tensor, spec: LinearSpec | CodebookSpec, importance: Tensor | None = None
    ) -> LUTQuantizedTensor:
        """Quantize `input` (any shape; fp32, fp16 or bf16), which also gives the logical dtype.

        Args:
            importance: weight of each element in k-means, of the same shape: the diagonal of a Hessian, for example.

        Raises:
            ValueError: a block does not divide the shape, or the spec is not a `CodebookSpec`.
            TypeError: `input` is not in floating point.
        """
        if not input.is_floating_point():
            raise TypeError(f"from_float takes a floating-point tensor, got {input.dtype}")
        linear = _linear_spec(spec)
        weight = cast(CodebookSpec, linear.weight)
        with torch.no_grad():
            scale = weight.choose_scale(input)
            stored = quantize_scale(scale, weight.scale_spec)
            scale = dequantize_scale(stored, weight.scale_spec)
            table = weight.choose_table(input, scale, importance)
            codes = weight.quantize(input, scale, table)
            return cls._from_codes(codes, {**stored, "table": table}, linear, input.dtype)

    @classmethod
    def from_plain(
        cls, codes: Tensor, scale: Tensor, table: Tensor, spec: LinearSpec | CodebookSpec, dtype: torch.dtype
    ) -> LUTQuantizedTensor:
        """Wrap existing codes and scales; the scales are not quantized, even if the spec has a `scale_spec`.

        Args:
            codes: uint8.
            scale: one element per block, floating point, with as many axes as `codes`.
            table: one shared table (L,), or one per block (*scale.shape, L).
            dtype: logical dtype.

        Raises:
            ValueError: a shape or dtype does not fit the spec.
        """
        linear = _linear_spec(spec)
        linear = replace(linear, weight=replace(linear.weight, scale_spec=None))
        return cls._from_codes(codes, {"scale": scale, "table": table}, linear, dtype)

    @classmethod
    def _from_codes(
        cls, codes: Tensor, others: dict[str, Tensor], linear: LinearSpec, dtype: torch.dtype
    ) -> LUTQuantizedTensor:
        """Make a tensor from unpacked codes and the other inner tensors in their stored form."""
        linear = _linear_spec(linear)
        scheme = Scheme(linear, tuple(codes.shape), dtype)
        linear.layout.check(scheme)
        plain = {**PlainLayout().forms(scheme), "table": _table_form(scheme)}
        check_inner_tensors({"qdata": codes, **others}, plain, scheme)
        packed = linear.layout.pack((codes, others["scale"], None), scheme)
        return cls({**others, **packed}, scheme)

    @property
    def codebook(self) -> CodebookSpec:
        """The spec of the weight."""
        return cast(CodebookSpec, self.scheme.weight)

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """(codes, scale, table), unpacked, the scale in floating point."""
        tensors = {"qdata": self.qdata, "scale": self.scale, "zero_point": None}
        return self.scheme.layout.unpack(tensors, self.scheme)[0], self.dense_scale(), self.table

    def dense_scale(self, rows: Tensor | None = None) -> Tensor:
        """The scale in floating point, of the given rows of blocks, or of all if `rows` is None."""
        if rows is None and self.scale_scale is None:
            return self.scale
        return dequantize_scale(self.inner_tensors, self.codebook.scale_spec, rows)

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """The tensors per block: (scale, tables), or (scale, None) if one table is shared."""
        return self.dense_scale(), None if self.codebook.table is not None else self.table

    def with_plain(
        self, plain: tuple[Tensor, Tensor, Tensor | None], spec: LinearSpec | None = None
    ) -> LUTQuantizedTensor:
        """A tensor of these codes, scales and tables (None: the table of this one), in the same logical dtype."""
        codes, scale, table = plain
        table = self.table if table is None else table
        return type(self).from_plain(codes, scale, table, spec or self.scheme.spec, self.scheme.dtype)

    def with_packed(self, qdata: Tensor, scale: Tensor, table: Tensor | None, scheme: Scheme) -> LUTQuantizedTensor:
        """`with_plain` from codes that are packed for the layout of `scheme`."""
        weight = replace(scheme.weight, scale_spec=None)
        scheme = replace(scheme, spec=replace(scheme.spec, weight=weight))
        tensors = {"qdata": qdata, "scale": scale, "table": self.table if table is None else table}
        return type(self)(tensors, scheme)

    def quantized_like(self, source: Tensor) -> LUTQuantizedTensor:
        """`source` quantized with the spec, scale dtype and layout of this tensor."""
        spec = self.scheme.spec
        if isinstance(source, LUTQuantizedTensor) and source.scheme.weight == spec.weight:
            others = {name: tensor for name, tensor in source.inner_tensors.items() if name != "qdata"}
            return type(self)._from_codes(source.plain()[0], others, spec, source.scheme.dtype)
        values = source.dequantize() if isinstance(source, QuantizedTensor) else source
        if self.codebook.scale_spec is None:
            spec = replace(spec, weight=replace(self.codebook, scale_dtype=self.scale.dtype))
        return type(self).from_float(values.to(self.device, self.scheme.dtype), spec)

    def canonical(self) -> tuple[Tensor, dict[str, Tensor]]:
        """(codes, the other tensors by name) as they are saved."""
        others = {name: tensor for name, tensor in self.inner_tensors.items() if name != "qdata"}
        return self.plain()[0], others

    @classmethod
    def from_canonical(cls, codes: Tensor, others: dict[str, Tensor], scheme: Scheme) -> LUTQuantizedTensor:
        """Inverse of `canonical`."""
        return cls._from_codes(codes, others, scheme.spec, scheme.dtype)

    def to_layout(self, layout: Layout) -> LUTQuantizedTensor:
        """The same numbers in another layout."""
        codes, others = self.canonical()
        return type(self)._from_codes(codes, others, replace(self.scheme.spec, layout=layout), self.scheme.dtype)

    def with_activation(self, activation: QuantSpec | None) -> LUTQuantizedTensor:
        """Return the tensor itself: a product with a look-up table takes activations in floating point only.

        Raises:
            ValueError: `activation` is not None.
        """
        if activation is not None:
            raise ValueError(f"a look-up table has no product with quantized activations, got {activation}")
        return self

    @classmethod
    def from_tensor(
        cls, input_tensor: Tensor, block_size: int = 64, scaler_block_size: int = 256
    ) -> LUTQuantizedTensor:
        """`to_nf4`, with the name and arguments of torchao's `NF4Tensor.from_tensor`."""
        return to_nf4(input_tensor, block_size, scaler_block_size)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        scheme = self.scheme
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{type(self).__name__}({scheme.spec}, layout={scheme.layout}, shape={scheme.shape}, "
            f"dtype={scheme.dtype}, device={self.device}{grad})"
        )


NF4Tensor = LUTQuantizedTensor
"""torchao's name, for ``NF4Tensor.from_tensor(weight, 64, 256)``."""


def nf4_spec(block_size: int = 64, scaler_block_size: int | None = 256) -> CodebookSpec:
    """Spec of NF4 in blocks of the last axis, with scales in int8 in blocks of `scaler_block_size`, or not quantized
    if that is None."""
    scale_spec = None
    if scaler_block_size is not None:
        scale_spec = QuantSpec(qdtype("int8"), PerGroup(scaler_block_size), quant_min=-127)
    return CodebookSpec(qdtype("uint4"), PerGroup(block_size), NF4_TABLE, scale_spec=scale_spec)


def to_nf4(tensor: Tensor, block_size: int = 64, scaler_block_size: int = 256) -> LUTQuantizedTensor:
    """Quantize to NF4 with double quantization, as in QLoRA.

    Args:
        block_size: elements of a row that share a scale; it must divide the length of a row.
        scaler_block_size: number of scales that are quantized with one scale.
    """
    return LUTQuantizedTensor.from_float(tensor, nf4_spec(block_size, scaler_block_size))


def linear_nf4(input: Tensor, weight: Tensor) -> Tensor:
    """`F.linear` with an NF4 weight, under torchao's name; it is differentiable with respect to the input."""
    return torch.nn.functional.linear(input, weight)


def _table_form(scheme: Scheme) -> tuple[Form]:
    weight = cast(CodebookSpec, scheme.weight)
    size = 2**weight.dtype.bits
    shape = (size,) if weight.table is not None else (*weight.scale_shape(scheme.codes_shape), size)
    return (Form(shape, FLOATS),)


def _linear_spec(spec: LinearSpec | CodebookSpec) -> LinearSpec:
    linear = spec if isinstance(spec, LinearSpec) else LinearSpec(spec)
    if not isinstance(linear.weight, CodebookSpec) or linear.activation is not None:
        raise ValueError(f"LUTQuantizedTensor takes a CodebookSpec and no activation, got {linear}")
    if linear.layout is None:
        packs = can_pack_bits(linear.weight.dtype)
        linear = replace(linear, layout=PackedLayout() if packs else PlainLayout())
    return linear
