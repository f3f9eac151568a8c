"""QuantSpec: how a tensor is quantized. LinearSpec: how a layer is.

One description serves every use: weights, activations, observers, fake quantization, training. It holds numerics only;
where a tensor lives and which kernel runs must not change numbers, so they are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import double_quant, fake_quant, qparams, scale_rules
from .affine import MappingType, ZeroPointDomain, check_floating_point, code_range, dequantize_affine, quantize_affine
from .granularity import Granularity, InBlocks, PerBlock, PerGroup, PerRow, PerTensor
from .jsonable import HashedOnce, jsonable
from .qdtype import QDType, qdtype
from .rounding import Noise, Rounding


@jsonable
class QuantSpec(InBlocks):
    """How one tensor is quantized. Hashable, JSON-able (`to_json` / `from_json`).

    Args:
        dtype: type of the codes; a torch dtype (``torch.int4``), a name or a `QDType`.
        granularity: which elements share a scale; a tuple of block sizes is a `PerBlock`.
        mapping: `MappingType`.
        zero_point_domain: `ZeroPointDomain`.
        scale_rule: how the range of a block is chosen.
        scale_dtype: dtype in which scales are kept; None is fp32 for rows and tensors, the tensor's own dtype for
            groups.
        rounding: `Rounding` of the codes.
        eps: smallest scale, also a subnormal one; None is the smallest normal number of the scale's dtype.
        quant_min, quant_max: narrower bounds than the type's own (symmetric int8 in [-127, 127]).
        preserve_zero: 0.0 is a code; False needs the FLOAT or OFFSET domain.
        scale_spec: how the scales are quantized themselves (see `double_quant`); None keeps them as they are. Zero
            points are then codes, or quantized too, which those of the OFFSET domain can be.
        preserve_max_val: of a symmetric mapping: the end of the range is the value of the outermost code; False: the
            far edge of that code's bucket, so that all buckets are equally wide.
        noise: of stochastic rounding; None draws a random number of torch's own for each element.

    The stages, each on its own: `choose_range`, `choose_qparams_from_range`, `quantize`, `dequantize`.
    """

    dtype: QDType
    granularity: Granularity = PerRow()
    mapping: MappingType = MappingType.SYMMETRIC
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT
    scale_rule: scale_rules.ScaleRule = scale_rules.MinMaxRule()
    scale_dtype: torch.dtype | None = None
    rounding: Rounding = Rounding.NEAREST_EVEN
    eps: float | None = None
    quant_min: float | None = None
    quant_max: float | None = None
    preserve_zero: bool = True
    scale_spec: QuantSpec | None = None
    preserve_max_val: bool = True
    noise: Noise | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", qdtype(self.dtype))
        if isinstance(self.granularity, tuple | list):
            object.__setattr__(self, "granularity", PerBlock(tuple(self.granularity)))
        if not isinstance(self.granularity, Granularity):
            raise TypeError(f"QuantSpec: granularity is a word such as PerRow() or a tuple, got {self.granularity!r}")
        code_range(self.dtype, self.quant_min, self.quant_max)
        qparams.check_options(self.mapping, self.zero_point_domain, self.preserve_zero, self.preserve_max_val)
        if self.noise is not None and self.rounding is not Rounding.STOCHASTIC:
            raise ValueError("QuantSpec: noise is that of stochastic rounding: rounding=Rounding.STOCHASTIC")
        double_quant.check_scale_spec(self.scale_spec)
        if self.scale_spec is not None and self.mapping is MappingType.SYMMETRIC_SIGNED:
            raise ValueError("QuantSpec: scale_spec quantizes positive scales, those of SYMMETRIC_SIGNED have any sign")
        are_codes = self.zero_point_domain is ZeroPointDomain.INT
        if self.scale_spec is not None and self.has_zero_point and not (are_codes or self.quantizes_zero_points):
            rule = "of the OFFSET domain with a scale_spec of integers of the NONE domain"
            raise ValueError(f"QuantSpec: quantized scales need zero points that are codes, or {rule}, got {self}")

    @property
    def code_range(self) -> tuple[float, float]:
        """(quant_min, quant_max) in force."""
        return code_range(self.dtype, self.quant_min, self.quant_max)

    @property
    def _codes(self) -> tuple[QDType, float | None, float | None, ZeroPointDomain]:
        return self.dtype, self.quant_min, self.quant_max, self.zero_point_domain

    @property
    def has_zero_point(self) -> bool:
        """Whether zero points carry information: a symmetric mapping onto signed codes always has zero there."""
        if self.zero_point_domain is ZeroPointDomain.NONE:
            return False
        low, high = self.code_range
        return self.mapping is MappingType.ASYMMETRIC or int((low + high + 1) / 2) != 0

    @property
    def quantizes_zero_points(self) -> bool:
        """Whether `scale_spec` quantizes the zero points as well."""
        offset = self.zero_point_domain is ZeroPointDomain.OFFSET
        return offset and self.has_zero_point and double_quant.only_multiplies(self.scale_spec)

    @property
    def rotation(self) -> int:
        """Size of the Hadamard matrix by which blocks are multiplied before they are quantized (see `RotatedSpec`)."""
        return 0

    @property
    def unrotated(self) -> QuantSpec:
        """The spec by which the rotated values are quantized."""
        return self

    def choose_range(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Range (min, max) that the codes of each block should cover, fp32, of the scale's shape."""
        check_floating_point("choose_range", input)
        return self.scale_rule.min_max(input, self)

    def choose_qparams_from_range(
        self, min_val: Tensor, max_val: Tensor, input_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor | None]:
        """Scale, as `scale_spec` leaves it, and zero point, None where it is always zero (see `has_zero_point`)."""
        return self.dense_qparams(*self._stored_qparams(min_val, max_val, input_dtype))

    def dense_qparams(self, tensors: Mapping[str, Tensor], zero_point: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point from the form in which they are stored, that of `choose_stored_qparams`."""
        if zero_point is not None and self.quantizes_zero_points:
            assert self.scale_spec is not None
            zero_point = double_quant.dequantize_zero_point({**tensors, "zero_point": zero_point}, self.scale_spec)
        return double_quant.dequantize_scale(tensors, self.scale_spec), zero_point

    def _stored_qparams(
        self, min_val: Tensor, max_val: Tensor, input_dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        dtype, domain, scale_dtype = self.dtype, self.zero_point_domain, self.stored_scale_dtype(input_dtype)
        zero_point_dtype = dtype.storage if domain is ZeroPointDomain.INT else scale_dtype
        codes = (dtype, self.quant_min, self.quant_max, self.eps)
        rest = (*codes, scale_dtype, zero_point_dtype, self.preserve_zero, domain)
        scale, zero_point = qparams.choose_qparams_affine_with_min_max(
            min_val, max_val, self.mapping, (), *rest, preserve_max_val=self.preserve_max_val
        )
        tensors = double_quant.quantize_scale(scale, self.scale_spec)
        if zero_point is None or not self.has_zero_point:
            return tensors, None
        if not self.quantizes_zero_points:
            return tensors, zero_point
        assert self.scale_spec is not None
        of_zero_point = double_quant.quantize_zero_point(zero_point, self.scale_spec)
        return {**tensors, "zero_point_scale": of_zero_point["zero_point_scale"]}, of_zero_point["zero_point"]

    def stored_scale_dtype(self, input_dtype: torch.dtype) -> torch.dtype:
        """Dtype of the scales, before `scale_spec` quantizes them."""
        keeps_input_dtype = isinstance(self.granularity, PerGroup) and self.scale_spec is None
        return self.scale_dtype or (input_dtype if keeps_input_dtype else torch.float32)

    def choose_qparams(self, input: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point of each block of `input`."""
        return self.choose_qparams_from_range(*self.choose_range(input), input.dtype)

    def choose_stored_qparams(self, input: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """`choose_qparams` as it is stored: the tensors of `quantize_scale`, and of `quantize_zero_point` the scale."""
        return self._stored_qparams(*self.choose_range(input), input.dtype)

    def quantize(
        self, input: Tensor, scale: Tensor, zero_point: Tensor | None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Codes of `input` in the storage dtype; see `quantize_affine`."""
        block, noise = self.block_size(input.shape), self.noise
        return quantize_affine(
            input, block, scale, zero_point, *self._codes, rounding=self.rounding, generator=generator, noise=noise
        )

    def dequantize(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, output_dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Reals of `codes`; see `dequantize_affine`."""
        block = self.block_size(codes.shape)
        return dequantize_affine(codes, block, scale, zero_point, *self._codes, output_dtype)

    def fake_quantize(self, input: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Choose, quantize and dequantize, in the input's dtype, with the straight-through gradient."""
        block, noise = self.block_size(input.shape), self.noise
        scale, zero_point = self.choose_qparams(input.detach())
        return fake_quant.fake_quantize_affine(
            input, block, scale, zero_point, *self._codes, rounding=self.rounding, generator=generator, noise=noise
        )

    def to_nearest(self) -> QuantSpec:
        """The same numerics, rounding to nearest."""
        if self.rounding is Rounding.NEAREST_EVEN:  # has no noise; Dynamo of torch 2.11 makes no copy
            return self
        return replace(self, rounding=Rounding.NEAREST_EVEN, noise=None)

    def __str__(self) -> str:
        words = [self.dtype.name, repr(self.granularity), self.mapping.name.lower()]
        if self.zero_point_domain is not ZeroPointDomain.INT:
            words.append(f"zero point {self.zero_point_domain.name.lower()}")
        if self.scale_spec is not None:
            words.append(f"scale {self.scale_spec.dtype.name} {self.scale_spec.granularity!r}")
        return " ".join(words)


@jsonable
class LinearSpec:
    """How a layer is quantized: its weight, the activation that meets it, and how the weight is laid out in memory.

    Args:
        weight: spec of the weight; a `CodebookSpec` for look-up tables.
        activation: spec of the layer's input; None leaves it in floating point.
        static: the activation's scale is fixed and travels with the weight, instead of being computed on each call.
        layout: a layout object, None for the plain layout.

    Raises:
        ValueError: static without an activation, or an activation that is not rotated as the weight is.
    """

    weight: QuantSpec | Any
    activation: QuantSpec | None = None
    static: bool = False
    layout: Any = None

    def __post_init__(self) -> None:
        if self.static and self.activation is None:
            raise ValueError("LinearSpec: a static activation scale needs an activation spec")
        if self.activation is not None and self.activation.rotation != getattr(self.weight, "rotation", 0):
            raise ValueError("LinearSpec: the activation has to be rotated as the weight is, in blocks of one size")

    def __str__(self) -> str:
        if self.activation is None:
            return f"weight {self.weight}"
        return f"weight {self.weight}, {'static' if self.static else 'dynamic'} activation {self.activation}"


def constant_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` as integers; symbolic sizes of a compiler become constants, since metadata cannot vary within a graph."""
    if not all(type(size) is int or isinstance(size, torch.SymInt) for size in shape):
        raise ValueError(f"a shape takes integers, got {shape!r}")
    return tuple(map(int, shape))


@jsonable
class Scheme(HashedOnce):
    """Metadata of a quantized tensor: hashable, JSON-able, no tensors and no callables.

    Args:
        spec: how the tensor and its activation are quantized, and the layout of the codes.
        shape: logical shape.
        dtype: logical dtype, that of the dequantized tensor.

    Raises:
        ValueError: a size of the shape is not an integer.
    """

    spec: LinearSpec
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", constant_shape(self.shape))

    # Guards of compiled graphs compare each scheme with a copy of it on each call: itself is compared in no time.
    def __deepcopy__(self, memo: dict[int, Any]) -> Scheme:
        return self

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """Shape of the codes: that of the tensor, unless a subclass stores them as a matrix."""
        return self.shape

    @property
    def weight(self) -> QuantSpec | Any:
        return self.spec.weight

    @property
    def activation(self) -> QuantSpec | None:
        return self.spec.activation

    @property
    def layout(self) -> Any:
        return self.spec.layout


# Specs of floating-point elements in short blocks whose scales have 8 bits: the MX formats, and NVFP4.
#
# MX (OCP Microscaling specification v1.0): blocks of 32 along a row, with a power of two, e8m0, as the scale of each.
#
# NVFP4: elements in e2m1 in blocks of 16 with an e4m3 scale each, and an fp32 scale for the tensor:
#
#     w = e2m1 code * e4m3 scale of the block * scale of the tensor,    scale of the tensor = absmax / (6 * 448)
#
# so the block with the largest element has the largest e4m3 scale.

MX_BLOCK = 32
NVFP4_BLOCK = 16


def mx_spec(dtype: QDType | torch.dtype | str) -> QuantSpec:
    """Spec of elements of `dtype`, ``"float8_e4m3fn"``, ``"float6_e2m3"`` or ``"float4_e2m1"``, in blocks of 32 that
    share an e8m0 scale."""
    none = ZeroPointDomain.NONE
    return QuantSpec(qdtype(dtype), PerGroup(MX_BLOCK), zero_point_domain=none, scale_dtype=torch.float8_e8m0fnu)


def nvfp4_spec() -> QuantSpec:
    """Spec of elements in e2m1, in blocks of 16 with scales in e4m3, which share an fp32 scale."""
    none = ZeroPointDomain.NONE
    scale_spec = QuantSpec(qdtype(torch.float8_e4m3fn), PerTensor(), zero_point_domain=none)
    return QuantSpec(qdtype("float4_e2m1"), PerGroup(NVFP4_BLOCK), zero_point_domain=none, scale_spec=scale_spec)
