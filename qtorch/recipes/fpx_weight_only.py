"""Weights in a small floating-point format of 3 to 6 bits, one scale per output channel."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import PackedLayout
from ..primitives import LinearSpec, PerRow, QuantSpec, ZeroPointDomain, qdtype
from ..primitives.floatx import FloatFormat
from ..recipe import WeightRecipe, register_recipe


@register_recipe("fpx_weight_only")
@dataclass(frozen=True)
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


fpx_weight_only = FpxWeightOnly
