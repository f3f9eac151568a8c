"""Functions and names of torchao 0.6: factories of quantized tensors, the registration of implementations of
`F.linear`, and `UintxTensor`, which is an affine quantized tensor with a packed layout and a scale of 1."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..primitives import LinearSpec, MappingType, PerBlock, PerRow, PerTensor, QuantSpec, ZeroPointDomain, floatx
from ..primitives.layouts import Layout, PackedLayout, PlainLayout
from ..primitives.qdtype import QDType, qdtype
from .affine_tensor import AffineQuantizedTensor


def to_affine_quantized_intx(
    input_float: Tensor, mapping_type: MappingType, block_size: Sequence[int], target_dtype: torch.dtype | QDType,
    quant_min: int | None = None, quant_max: int | None = None, eps: float | None = None,
    scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None, preserve_zero: bool = True,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, _layout: Layout = PlainLayout(),
) -> AffineQuantizedTensor:  # fmt: skip
    """Quantize a float tensor to integer codes with scales chosen from its blocks.

    `zero_point_dtype` is accepted for compatibility and ignored: zero points are stored, without loss, in the storage
    dtype of the codes, or in the dtype of the scale where they are real numbers.
    """
    dtype: Any = target_dtype
    spec = QuantSpec(
        dtype, PerBlock(tuple(block_size)), mapping_type, zero_point_domain, scale_dtype=scale_dtype, eps=eps,
        quant_min=quant_min, quant_max=quant_max, preserve_zero=preserve_zero,
    )  # fmt: skip
    return AffineQuantizedTensor.from_float(input_float, LinearSpec(spec, layout=_layout))


def to_affine_quantized_intx_static(
    input_float: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int],
    target_dtype: torch.dtype | QDType, quant_min: int | None = None, quant_max: int | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, _layout: Layout = PlainLayout(),
) -> AffineQuantizedTensor:  # fmt: skip
    """Quantize a float tensor with given scales and zero points, one element per block."""
    mapping = MappingType.SYMMETRIC if zero_point is None else MappingType.ASYMMETRIC
    domain = ZeroPointDomain.NONE if zero_point is None else zero_point_domain
    dtype: Any = target_dtype
    spec = QuantSpec(dtype, PerBlock(tuple(block_size)), mapping, domain, quant_min=quant_min, quant_max=quant_max)
    shape = spec.scale_shape(input_float.shape)
    scale = scale.reshape(shape)
    if zero_point is not None:
        zero_point = zero_point.reshape(shape)
        if zero_point_domain is ZeroPointDomain.INT:
            zero_point = zero_point.to(spec.dtype.storage)
    codes = spec.quantize(input_float, scale, zero_point)
    linear = LinearSpec(spec, layout=_layout)
    return AffineQuantizedTensor.from_plain(codes, scale, zero_point, linear, input_float.dtype)


def to_affine_quantized_floatx(
    input_float: Tensor, block_size: Sequence[int], target_dtype: torch.dtype | QDType, _layout: Layout = PlainLayout(),
    scale_dtype: torch.dtype | None = None,
) -> AffineQuantizedTensor:  # fmt: skip
    """Quantize a float tensor to floating-point codes (float8): code = cast(x / scale), the largest code at absmax."""
    options: Any = {"scale_dtype": scale_dtype, "zero_point_domain": ZeroPointDomain.NONE, "_layout": _layout}
    return to_affine_quantized_intx(input_float, MappingType.SYMMETRIC, block_size, target_dtype, **options)


def to_affine_quantized_floatx_static(
    input_float: Tensor, scale: Tensor, block_size: Sequence[int], target_dtype: torch.dtype | QDType,
    _layout: Layout = PlainLayout(),
) -> AffineQuantizedTensor:  # fmt: skip
    """Quantize a float tensor to floating-point codes with given scales, one element per block."""
    return to_affine_quantized_intx_static(input_float, scale, None, block_size, target_dtype, _layout=_layout)


def to_affine_quantized_fpx(input_float: Tensor, ebits: int, mbits: int) -> AffineQuantizedTensor:
    """Quantize a float tensor to small floating-point codes, with one scale per row, packed to their true size.

    A code has a sign, `ebits` exponent and `mbits` mantissa bits. torchao takes `(input_float, _layout)` with the bits
    in a `FloatxTensorCoreLayout(ebits, mbits)`; here a layout does not define the format of the codes.

    Raises:
        ValueError: the format is not (3, 2), (2, 3), (2, 2), (3, 1), (2, 1) or (2, 0).
    """
    dtype = qdtype(floatx.FloatFormat(ebits, mbits).name)
    spec = QuantSpec(dtype, PerRow(), zero_point_domain=ZeroPointDomain.NONE)
    return AffineQuantizedTensor.from_float(input_float, LinearSpec(spec, layout=PackedLayout()))


def to_linear_activation_quantized(
    weight: AffineQuantizedTensor, activation: QuantSpec, act_scale: Tensor | None = None,
    act_zero_point: Tensor | None = None,
) -> AffineQuantizedTensor:  # fmt: skip
    """The same weight, with its input quantized by `activation`: on each call, or with a fixed `act_scale`.

    Raises:
        TypeError: `weight` is not quantized, or `activation` is not a `QuantSpec` (a callable could not be saved,
            compared or compiled).
    """
    if not isinstance(weight, AffineQuantizedTensor):
        raise TypeError(f"to_linear_activation_quantized takes a quantized weight, got {type(weight).__name__}")
    if not isinstance(activation, QuantSpec):
        raise TypeError(f"to_linear_activation_quantized takes a QuantSpec, got {type(activation).__name__}")
    return weight.with_activation(activation, act_scale, act_zero_point)


Condition = Callable[[Tensor, AffineQuantizedTensor, Tensor | None], bool]
Implementation = Callable[[Tensor, AffineQuantizedTensor, Tensor | None], Tensor]

dispatches: dict[Condition, Implementation] = {}
"""In the order of registration."""


def register_aqt_quantized_linear_dispatch(dispatch_condition: Condition, impl: Implementation) -> None:
    """Call `impl(input, weight, bias)` for `F.linear` whenever `dispatch_condition(input, weight, bias)` is true.

    Conditions are tested before the kernel registry, in the order of registration. Prefer to register a kernel for a
    scheme (`qtorch.kernels.register`): it is looked up once instead of on each call, and `explain` shows it.
    """
    dispatches[dispatch_condition] = impl


def deregister_aqt_quantized_linear_dispatch(dispatch_condition: Condition) -> None:
    """Undo `register_aqt_quantized_linear_dispatch`.

    Raises:
        ValueError: that condition is not registered.
    """
    if dispatches.pop(dispatch_condition, None) is None:
        raise ValueError("deregister_aqt_quantized_linear_dispatch: this dispatch condition is not registered")


class UintxTensor(AffineQuantizedTensor):
    """Unsigned integers of 1 to 7 bits, packed to their true size. Make one with `to_uintx`."""

    @classmethod
    def from_uint8(cls, int_data: Tensor, dtype: torch.dtype | QDType | str, pack_dim: int = -1) -> "UintxTensor":
        """Pack `int_data` (any shape, uint8) along `pack_dim`.

        Args:
            dtype: ``torch.uint1`` to ``torch.uint7``, or their names.

        Raises:
            TypeError: `int_data` is not uint8.
            ValueError: `dtype` is not one of these, cannot hold a number, or `pack_dim` does not exist.
        """
        kind = qdtype(dtype)
        if kind.name not in [f"uint{bits}" for bits in range(1, 8)]:
            raise ValueError(f"to_uintx takes uint1 to uint7, got {kind.name}")
        if int_data.dtype != torch.uint8:
            raise TypeError(f"to_uintx takes uint8 data, got {int_data.dtype}")
        ndim = int_data.dim()
        if not -ndim <= pack_dim < ndim:
            raise ValueError(f"to_uintx: data of shape {tuple(int_data.shape)} has no dimension {pack_dim}")
        if not int_data.is_meta and bool((int_data > kind.quant_max).any()):
            raise ValueError(f"to_uintx: {kind.name} holds 0 to {kind.quant_max}, the data has {int(int_data.max())}")
        spec = QuantSpec(kind, PerTensor(), zero_point_domain=ZeroPointDomain.NONE)
        scale = torch.ones((1,) * ndim, device=int_data.device, dtype=torch.float32)
        layout = PackedLayout(pack_dim % ndim - ndim)
        result = cls.from_plain(int_data, scale, None, LinearSpec(spec, layout=layout), torch.uint8)
        assert isinstance(result, cls)
        return result

    def get_plain(self) -> Tensor:
        """The numbers, unpacked: uint8, in the shape of the tensor."""
        return self.plain()[0]


def to_uintx(uint8_data: Tensor, dtype: torch.dtype | QDType | str, pack_dim: int = -1) -> UintxTensor:
    """Pack uint8 numbers to the true size of `dtype`, along `pack_dim`; see `UintxTensor.from_uint8`."""
    return UintxTensor.from_uint8(uint8_data, dtype, pack_dim)
