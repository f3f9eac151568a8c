"""NF4 weights in groups, with double quantization of the scales: the frozen base of QLoRA."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes.codebook import nf4_spec
from ..primitives import LinearSpec
from ..recipe import WeightRecipe, register_recipe


@register_recipe("nf4_weight_only")
@dataclass(frozen=True)
class NF4WeightOnly(WeightRecipe):
    """Weights in 4-bit NormalFloat (QLoRA, arXiv 2305.14314).

    A value is a quantile of a normal distribution times the largest magnitude of the group.

    Args:
        group_size: elements of a row that share a scale; it must divide the row.
        double_quantize: quantize the scales to int8 in blocks of 256: 4.13 bits per weight in groups of 64, instead of
            4.25 with 16-bit scales.
    """

    group_size: int = 64
    double_quantize: bool = True

    def linear_spec(self) -> LinearSpec:
        return LinearSpec(nf4_spec(self.group_size, 256 if self.double_quantize else None))


nf4_weight_only = NF4WeightOnly
