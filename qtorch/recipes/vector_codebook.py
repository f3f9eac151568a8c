"""Weights as entries of a codebook of vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..primitives import LinearSpec, PerGroup
from ..primitives.layouts import VectorCodebookLayout
from ..primitives.vector_codebook import RotatedVectorSpec, VectorSpec, codebook_arguments
from .base import WeightRecipe, register_recipe


@register_recipe("vector_codebook_weight_only")
@dataclass(frozen=True)
class VectorCodebookWeightOnly(WeightRecipe):
    """Four weights in a byte, an entry of a codebook of 256: 2.06 bits a weight with the scales, in bf16.

    Made for `auto` and `gptq`, which need data; rounding to nearest costs a model much at 2 bits.

    Args:
        group_size: elements of a row that share a scale and are rotated together, by a Hadamard matrix with random
            signs; a power of two, of 4 or more, that divides the row. The input is rotated on each call.
        rotated: False leaves weights and inputs as they are: worse, unless weights are normally distributed.
    """

    group_size: int = 256
    rotated: bool = True

    def linear_spec(self) -> LinearSpec:
        kind = RotatedVectorSpec if self.rotated else VectorSpec
        spec = kind(granularity=PerGroup(self.group_size), scale_dtype=torch.bfloat16, **codebook_arguments())
        return LinearSpec(spec, layout=VectorCodebookLayout())
