"""Weights with zeros that products skip: whole blocks, or two of each four elements."""

from dataclasses import replace
from typing import ClassVar

import torch

from ..dtypes import BlockSparseLayout, SemiSparseLayout
from ..primitives import Granularity, LinearSpec, PerRow, mask_2_4, mask_blocks
from . import float8, integer
from .base import WeightRecipe, register_recipe


@register_recipe("block_sparse")
class BlockSparse(WeightRecipe):
    """`recipe` on a weight of which each row of blocks keeps those with the largest norms; the rest is dropped.

    Products take the time of what is kept. A dense weight becomes inaccurate: prune on data,
    `calibrated(block_sparse(...), batches)`, or take a weight that was trained to be sparse in blocks.

    Args:
        recipe: without zero points, with scales per row or in groups of a divisor of `block_size`, such as
            `int8_dynamic_activation_int8_weight()` or `int8_dynamic_activation_int4_weight(group_size=32)`.
        sparsity: share of the blocks of each row of blocks that is dropped, in [0, 1).
        block_size: rows and columns of a block, 16 to 64. Larger ones are faster.

    Raises:
        ValueError: `recipe` has static activations, zero points, a layout or scales that do not go with blocks, or
            prunes itself.
    """

    prunes: ClassVar[bool] = True
    recipe: WeightRecipe
    sparsity: float = 0.8
    block_size: int = 64

    def __post_init__(self) -> None:
        if self.recipe.prunes or self.recipe.in_order or self.recipe.branch_rank:
            raise ValueError(f"block_sparse takes int8_dynamic_activation_int8_weight() or its like, got {self.recipe}")
        if self.recipe.linear_spec().static:
            raise ValueError(f"block_sparse: {self.recipe} has a static activation, which it does not take")
        super().__post_init__()

    def linear_spec(self) -> LinearSpec:
        return replace(self.recipe.linear_spec(), layout=BlockSparseLayout(self.block_size, self.sparsity))

    def kept(self, importance: torch.Tensor) -> torch.Tensor:
        return mask_blocks(importance, self.block_size, self.sparsity)


class _SemiSparse(WeightRecipe):
    prunes: ClassVar[bool] = True

    def kept(self, importance: torch.Tensor) -> torch.Tensor:
        return mask_2_4(importance)


@register_recipe("float8_dynamic_activation_float8_semi_sparse_weight")
class Float8DynamicActivationFloat8SemiSparseWeight(_SemiSparse):
    """Weights and activations in float8_e4m3fn, the weights pruned to 2:4 and packed at 5 bits per element.

    Weights are pruned as by `int8_dynamic_activation_int8_semi_sparse_weight`.

    Args:
        granularity: `PerRow()`, a scale per output channel and per token; `PerTensor()`, one of each.

    Raises:
        ValueError: the granularity is neither.
    """

    granularity: Granularity = PerRow()

    def linear_spec(self) -> LinearSpec:
        float8.check_row_or_tensor(self, self.granularity)
        codes = float8.float8_spec(self, torch.float8_e4m3fn, self.granularity)
        return LinearSpec(codes, codes, layout=SemiSparseLayout())


@register_recipe("int8_dynamic_activation_int8_semi_sparse_weight")
class Int8DynamicActivationInt8SemiSparseWeight(_SemiSparse, integer.Int8DynamicActivationInt8Weight):
    """`int8_dynamic_activation_int8_weight` with weights pruned to 2:4 and packed at 5 bits per element.

    The two largest magnitudes of each four elements along a row are kept, and scales are chosen for those. A dense
    weight becomes inaccurate (SQNR of 7 to 9 dB); one that was trained to be 2:4 sparse loses nothing.

    Args:
        act_mapping_type: SYMMETRIC, codes in [-127, 127]; ASYMMETRIC, [-128, 127] with a zero point per token.
    """

    def linear_spec(self) -> LinearSpec:
        return replace(super().linear_spec(), layout=SemiSparseLayout())
