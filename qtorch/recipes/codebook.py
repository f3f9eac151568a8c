"""Weights as indices into tables of values, or of vectors."""

import torch

from ..dtypes.codebook_tensor import nf4_spec
from ..primitives import LinearSpec, PerGroup, PerRow, codebooks, qdtype
from ..primitives.layouts import VectorCodebookLayout
from ..primitives.vector_spec import RotatedVectorSpec, codebook_arguments
from .base import WeightRecipe, register_recipe


@register_recipe("lut_weight_only")
class LUTWeightOnly(WeightRecipe):
    """Weights as indices into tables of 2^bits values, fitted to each group by k-means.

    Args:
        bits: 2 to 4.
        group_size: elements of a row that share a scale and a table of 2^bits fp16 values; -1 for the whole row. It
            must divide the row. A table takes 16 * 2^bits bits: in groups of 64, 2 bits per weight with 3-bit codes.

    Raises:
        ValueError: `bits` is not 2 to 4, or the group size is below 1 and not -1.
    """

    bits: int = 4
    group_size: int = -1

    def linear_spec(self) -> LinearSpec:
        if self.bits not in (2, 3, 4):
            raise ValueError(f"lut_weight_only: bits is {self.bits}; it must be 2, 3 or 4")
        granularity = PerRow() if self.group_size == -1 else PerGroup(self.group_size)
        return LinearSpec(codebooks.CodebookSpec(qdtype(f"uint{self.bits}"), granularity))


@register_recipe("nf4_weight_only")
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


@register_recipe("vector_codebook_weight_only")
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
