"""Weights, and activations, in the block formats of `primitives.spec`: MX and NVFP4."""

import math
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch

from ..dtypes import AffineQuantizedTensor, PackedLayout
from ..model.targets import Target
from ..primitives import LinearSpec, RotatedSpec, Scheme, double_quant, mx_spec, nvfp4_spec, qdtype
from .base import WeightRecipe, register_recipe


class _Mx(WeightRecipe):
    element: ClassVar[str]
    quantizes_activations: ClassVar[bool] = False

    def linear_spec(self) -> LinearSpec:
        spec = mx_spec(self.element)
        layout = PackedLayout() if spec.dtype.bits < 8 else None
        return LinearSpec(spec, spec if self.quantizes_activations else None, layout=layout)


@register_recipe("mxfp8_weight_only")
class Mxfp8WeightOnly(_Mx):
    """Weights in MXFP8 (e4m3)."""

    element = "float8_e4m3fn"


@register_recipe("mxfp6_weight_only")
class Mxfp6WeightOnly(_Mx):
    """Weights in MXFP6 (e2m3)."""

    element = "float6_e2m3"


@register_recipe("mxfp4_weight_only")
class Mxfp4WeightOnly(_Mx):
    """Weights in MXFP4 (e2m1)."""

    element = "float4_e2m1"


@register_recipe("mxfp8_dynamic_activation_mxfp8_weight")
class Mxfp8DynamicActivationMxfp8Weight(Mxfp8WeightOnly):
    """Weights and activations in MXFP8 (e4m3), with activation scales computed on each call."""

    quantizes_activations = True


@register_recipe("mxfp4_dynamic_activation_mxfp4_weight")
class Mxfp4DynamicActivationMxfp4Weight(Mxfp4WeightOnly):
    """Weights and activations in MXFP4 (e2m1), with activation scales computed on each call.

    Args:
        rotated: multiply each block of 32 weights, and of the activation on each call, by a Hadamard matrix before it
            is quantized (see `RotatedSpec`): outliers are spread over their block.
    """

    quantizes_activations = True
    rotated: bool = False

    def linear_spec(self) -> LinearSpec:
        spec = super().linear_spec()
        if not self.rotated:
            return spec
        rotated = RotatedSpec(**{f.name: getattr(spec.weight, f.name) for f in fields(spec.weight)})
        return replace(spec, weight=rotated, activation=rotated)


_LARGEST = 6 * 448
"""The largest number at a scale of 1: an element of 6 in a block with a scale of 448."""

_SMALLEST_SCALE = 2.0**-9
"""The smallest positive number of float8_e4m3fn."""


@register_recipe("nvfp4_weight_only")
class Nvfp4WeightOnly(WeightRecipe):
    """Weights in NVFP4, 4.5 bits per weight.

    Args:
        tensor_scale: the fp32 scale of the tensor; None takes absmax / 2688. Layers that an engine joins have to share
            it, and a power of two is exact in files that hold its inverse (see docs/guides/vllm.md).

    Raises:
        ValueError: `tensor_scale` is not positive and finite.
    """

    quantizes_activations: ClassVar[bool] = False

    tensor_scale: float | None = None

    def __post_init__(self) -> None:
        scale, fp32 = self.tensor_scale, torch.finfo(torch.float32)
        if scale is not None and not fp32.tiny <= scale <= fp32.max:
            raise ValueError(f"{self.name}: tensor_scale is positive, finite and a normal number in fp32, got {scale}")
        super().__post_init__()

    def linear_spec(self) -> LinearSpec:
        activation = nvfp4_spec() if self.quantizes_activations else None
        return LinearSpec(nvfp4_spec(), activation, layout=PackedLayout())

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        if self.tensor_scale is None:
            return super().apply(weight)
        linear = self.linear_spec()
        spec, scale_type = linear.weight, qdtype(torch.float8_e4m3fn)
        dense, _ = replace(spec, scale_spec=None, scale_dtype=torch.float32).choose_qparams(weight)
        scaled = (dense / self.tensor_scale).clamp(_SMALLEST_SCALE, scale_type.quant_max)
        scales = {
            "scale": scaled.to(scale_type.storage),
            "scale_scale": torch.tensor([self.tensor_scale], dtype=torch.float32, device=weight.device),
        }
        codes = spec.quantize(weight, double_quant.dequantize_scale(scales, spec.scale_spec), None)
        scheme = Scheme(linear, tuple(weight.shape), weight.dtype)
        return AffineQuantizedTensor.from_canonical(codes, scales, scheme)

    def has_made(self, target: Target[Any]) -> bool:
        if not super().has_made(target):
            return False
        found: Any = target.parameter
        return self.tensor_scale is None or bool((found.scale_scale == self.tensor_scale).all())


def shared_tensor_scale(absmax: float) -> float:
    """The smallest power of two that is large enough as the scale of tensors with this largest magnitude. Powers of two
    multiply and divide exactly, and use at least half of the range of the scales of blocks."""
    least = absmax / _LARGEST
    if not least > 0:
        return 1.0
    mantissa, exponent = math.frexp(least)
    return 2.0 ** max(-126, exponent - 1 if mantissa == 0.5 else exponent)


@register_recipe("nvfp4_dynamic_activation_nvfp4_weight")
class Nvfp4DynamicActivationNvfp4Weight(Nvfp4WeightOnly):
    """Weights and activations in NVFP4, with activation scales computed on each call.

    The fp32 scale of an activation is computed from the finite rows of the whole batch, so rows are not independent of
    one another. Blocks whose largest number is at least 1 / 28672 of the batch's (448 / 2^-6, the normal scales of
    e4m3) have the accuracy of the format; below it they lose some, and from about 1 / 458752 on they are zeros.
    """

    quantizes_activations = True
