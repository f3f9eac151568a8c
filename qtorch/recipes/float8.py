"""float8 weights and other floats of few bits; activations in floating point or in float8."""

import torch

from ..dtypes import Layout, PackedLayout
from ..primitives import Granularity, LinearSpec, PerBlock, PerGroup, PerRow, PerTensor, QuantSpec, ZeroPointDomain
from ..primitives.floatx import FloatFormat
from ..primitives.qdtype import qdtype
from .base import WeightRecipe, register_recipe


def float8_spec(
    recipe: WeightRecipe, dtype: torch.dtype, granularity: Granularity, scale_dtype: torch.dtype | None = None
) -> QuantSpec:
    """Spec of float8 codes; `ValueError`, which names `recipe`, for other dtypes."""
    found = qdtype(dtype)
    if not found.name.startswith("float8_"):
        raise ValueError(f"{recipe.name} takes float8_e4m3fn, float8_e5m2 and their fnuz forms, got {found.name}")
    return QuantSpec(found, granularity, zero_point_domain=ZeroPointDomain.NONE, scale_dtype=scale_dtype)


def check_row_or_tensor(recipe: WeightRecipe, granularity: Granularity) -> None:
    """Raise `ValueError`, which names `recipe`, unless `granularity` is `PerRow()` or `PerTensor()`."""
    if not isinstance(granularity, PerRow | PerTensor):
        raise ValueError(f"{recipe.name}: granularity is PerRow() or PerTensor(), got {granularity}")


@register_recipe("float8_weight_only")
class Float8WeightOnly(WeightRecipe):
    """Weights in float8, with the largest magnitude of a channel at the largest code.

    Args:
        dtype: a float8 dtype of torch.
        granularity: which elements share a scale.
        scale_dtype: dtype of the scales of the weight; None is fp32. See `int8_weight_only`.

    Raises:
        ValueError: the dtype is not float8.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Granularity = PerRow()
    scale_dtype: torch.dtype | None = None

    def linear_spec(self) -> LinearSpec:
        return LinearSpec(float8_spec(self, self.dtype, self.granularity, self.scale_dtype))


@register_recipe("float8_dynamic_activation_float8_weight")
class Float8DynamicActivationFloat8Weight(WeightRecipe):
    """Weights and activations in float8, the scales of the activations computed on each call.

    Args:
        granularity: `PerRow()`, a scale per output channel and per token; `PerTensor()`, one of each;
            `PerBlock((128, 128))`, one per block of the weight and per 128 elements of a token (DeepSeek-V3,
            arXiv 2412.19437, section 3.3.2), which vLLM serves too; on a CPU all are emulated.
        activation_dtype, weight_dtype: float8 dtypes of torch.
        scale_dtype: dtype of the scales of the weight; None is fp32. See `int8_weight_only`.

    Raises:
        ValueError: the granularity or a dtype is not one of these.
    """

    granularity: Granularity = PerRow()
    activation_dtype: torch.dtype = torch.float8_e4m3fn
    weight_dtype: torch.dtype = torch.float8_e4m3fn
    scale_dtype: torch.dtype | None = None

    def linear_spec(self) -> LinearSpec:
        of_tokens = self.granularity
        if isinstance(self.granularity, PerBlock) and len(self.granularity.sizes) == 2:
            of_tokens = PerGroup(self.granularity.sizes[1])
        else:
            check_row_or_tensor(self, self.granularity)
        weight = float8_spec(self, self.weight_dtype, self.granularity, self.scale_dtype)
        # Scales of groups have the dtype of the input by default; the kernels of vLLM have them in fp32.
        scale_dtype = torch.float32 if isinstance(of_tokens, PerGroup) else None
        return LinearSpec(weight, float8_spec(self, self.activation_dtype, of_tokens, scale_dtype))


@register_recipe("float8_dynamic_activation_int4_weight")
class Float8DynamicActivationInt4Weight(WeightRecipe):
    """Weights in symmetric int4 per group of input channels, activations in float8 per token.

    The scales of the activations are computed on each call.

    Args:
        group_size: elements of a row that share a scale; -1 for the whole row. It must divide the row.
        activation_dtype: a float8 dtype of torch.
        layout: how weights are stored in memory.

    Raises:
        ValueError: the group size is below 1 and not -1, or the dtype is not float8.
    """

    group_size: int = 128
    activation_dtype: torch.dtype = torch.float8_e4m3fn
    layout: Layout = PackedLayout()

    def linear_spec(self) -> LinearSpec:
        weight = QuantSpec(qdtype("int4"), PerGroup(self.group_size))
        return LinearSpec(weight, float8_spec(self, self.activation_dtype, PerRow()), layout=self.layout)


@register_recipe("fpx_weight_only")
class FpxWeightOnly(WeightRecipe):
    """Weights in a floating-point format with a sign, `ebits` exponent and `mbits` mantissa bits.

    Args:
        ebits, mbits: (3, 2), (2, 3), (2, 2), (3, 1), (2, 1) or (2, 0).

    Raises:
        ValueError: the format is not one of these.
    """

    ebits: int
    mbits: int

    def linear_spec(self) -> LinearSpec:
        dtype = qdtype(FloatFormat(self.ebits, self.mbits).name)
        spec = QuantSpec(dtype, PerRow(), zero_point_domain=ZeroPointDomain.NONE)
        return LinearSpec(spec, layout=PackedLayout())
