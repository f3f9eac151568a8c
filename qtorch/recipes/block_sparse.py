"""A recipe for weights of which most blocks are zero, and skipped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..layouts import BlockSparseLayout
from ..primitives import LinearSpec, mask_blocks
from ..recipe import WeightRecipe, register_recipe


@register_recipe("block_sparse")
@dataclass(frozen=True)
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
        if not isinstance(self.recipe, WeightRecipe) or self.recipe.prunes or self.recipe.in_order:
            raise ValueError(
                f"block_sparse takes a recipe for inference such as int8_dynamic_activation_int8_weight(), got "
                f"{self.recipe}"
            )
        if self.recipe.linear_spec().static:
            raise ValueError(f"block_sparse: {self.recipe} has a static activation, which it does not take")
        super().__post_init__()

    def linear_spec(self) -> LinearSpec:
        return replace(self.recipe.linear_spec(), layout=BlockSparseLayout(self.block_size, self.sparsity))

    def kept(self, importance: Tensor) -> Tensor:
        return mask_blocks(importance, self.block_size, self.sparsity)


block_sparse = BlockSparse
