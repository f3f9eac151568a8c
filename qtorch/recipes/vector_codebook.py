"""Weights as entries of a codebook of vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..primitives import LinearSpec, PerGroup, PerRow
from ..primitives.layouts import VectorCodebookLayout
from ..primitives.vector_codebook import RotatedVectorSpec, codebook_arguments
from .base import WeightRecipe, register_recipe


@register_recipe("vector_codebook_weight_only")
@dataclass(frozen=True)
class VectorCodebookWeightOnly(WeightRecipe):
    """Four weights in a byte, an entry of a codebook of 256: 2 bits a weight, and a scale in bf16 for a row.

    Made for `auto` and `gptq`, which need data; rounding to nearest costs a model much at 2 bits. Groups, and of rows
    with one scale blocks of up to 256 elements, are multiplied by a Hadamard matrix with random signs before, and the
    input by the same one on each call.

    Args:
        group_size: elements of a row that share a scale, -1 for the whole row; else a power of two, of 4 or more, that
            divides the row.

    Raises:
        ValueError: `group_size` is no power of two of 4 or more, and not -1.
    """

    group_size: int = -1

    def linear_spec(self) -> LinearSpec:
        granularity = PerRow() if self.group_size == -1 else PerGroup(self.group_size)
        spec = RotatedVectorSpec(granularity=granularity, scale_dtype=torch.bfloat16, **codebook_arguments())
        return LinearSpec(spec, layout=VectorCodebookLayout())
