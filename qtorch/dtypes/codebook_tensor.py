"""LUTQuantizedTensor: a tensor stored as indices into look-up tables.

    w = table[codes] * scale            (see `primitives.codebook`)

One table is shared (NF4) or each block has its own (k-means). With double quantization the scales are quantized too
(see `primitives.double_quant`); views and slices of such a tensor hold the same scales, dequantized to fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ..primitives import NF4_TABLE, CodebookSpec, LinearSpec, PerGroup, QuantSpec, Scheme, double_quant, qdtype
from ..primitives.affine import check_floating_point
from ..primitives.layouts import FLOATS, Form, Forms, Plain, smallest_layout
from .base import QuantizedTensor, with_dense_scales

_TENSORS = ("qdata", "scale", "table", "scale_scale", "scale_mean")


class LUTQuantizedTensor(QuantizedTensor):
    """A tensor stored as indices into look-up tables. Make one with `from_float` or `from_plain`.

    Attributes:
        qdata: codes in the form of the layout: packed to their true size along one axis, or one byte each.
        scale: one element per block; quantized if `scale_scale` and `scale_mean` are not None.
        table: (L,), or one per block, (*scale.shape, L).
    """

    spec_type = CodebookSpec
    per_block = "table"

    qdata: Tensor
    table: Tensor
    scale_mean: Tensor | None

    @classmethod
    def tensor_names(cls, scheme: Scheme) -> tuple[str, ...]:
        return _TENSORS

    @classmethod
    def _forms_beside_layout(cls, scheme: Scheme) -> Forms:
        if scheme.activation is not None:
            raise ValueError(f"a look-up table has no product with quantized activations, got {scheme.spec}")
        weight = cast(CodebookSpec, scheme.weight)
        size = 2**weight.dtype.bits
        shape = (size,) if weight.table is not None else (*weight.scale_shape(scheme.codes_shape), size)
        return {"table": (Form(shape, FLOATS),)}

    @classmethod
    def complete(cls, spec: LinearSpec | CodebookSpec) -> LinearSpec:
        linear = spec if isinstance(spec, LinearSpec) else LinearSpec(spec)
        if not isinstance(linear.weight, CodebookSpec) or linear.activation is not None:
            raise ValueError(f"LUTQuantizedTensor takes a CodebookSpec and no activation, got {linear}")
        return replace(linear, layout=smallest_layout(linear.weight.dtype)) if linear.layout is None else linear

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
        check_floating_point("from_float", input)
        linear = cls.complete(spec)
        weight = cast(CodebookSpec, linear.weight)
        with torch.no_grad():
            scale = weight.choose_scale(input)
            stored = double_quant.quantize_scale(scale, weight.scale_spec)
            scale = double_quant.dequantize_scale(stored, weight.scale_spec)
            table = weight.choose_table(input, scale, importance)
            codes = weight.quantize(input, scale, table)
            return cls._from_codes(codes.contiguous(), {**stored, "table": table}, linear, input.dtype)

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
        linear = with_dense_scales(cls.complete(spec))
        return cls._from_codes(codes, {"scale": scale, "table": table}, linear, dtype)

    @property
    def codebook(self) -> CodebookSpec:
        """The spec of the weight."""
        return cast(CodebookSpec, self.scheme.weight)

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        tensors = {"qdata": self.qdata, "scale": self.scale, "zero_point": None}
        return self.scheme.layout.unpack(tensors, self.scheme)[0], self.dense_scale(), self.table

    def scales(self) -> tuple[Tensor, Tensor | None]:
        return self.dense_scale(), None if self.codebook.table is not None else self.table

    def with_plain(self, plain: Plain, spec: LinearSpec | None = None) -> LUTQuantizedTensor:
        """A tensor of these codes, scales and tables (None: the table of this one), in the same logical dtype."""
        codes, scale, table = plain
        table = self.table if table is None else table
        return type(self).from_plain(codes, scale, table, spec or self.scheme.spec, self.scheme.dtype)

    def canonical(self) -> tuple[Tensor, dict[str, Tensor]]:
        return self.plain()[0], {name: tensor for name, tensor in self.inner_tensors.items() if name != "qdata"}

    def with_activation(self, activation: QuantSpec | None) -> LUTQuantizedTensor:
        """Return the tensor itself: a product with a look-up table takes activations in floating point only."""
        if activation is not None:
            raise ValueError(f"a look-up table has no product with quantized activations, got {activation}")
        return self

    @classmethod
    def from_tensor(
        cls, input_tensor: Tensor, block_size: int = 64, scaler_block_size: int = 256
    ) -> LUTQuantizedTensor:
        """`to_nf4`, with the name and arguments of torchao's `NF4Tensor.from_tensor`."""
        return to_nf4(input_tensor, block_size, scaler_block_size)


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
