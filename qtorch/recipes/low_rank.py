"""A branch of low rank in 16 bits beside the codes of any recipe: w = Q + up down (SVDQuant, arXiv 2411.05007)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..dtypes import LowRankWeight, QuantizedTensor, low_rank_weight
from ..primitives.granularity import IndivisibleError
from .base import Branch, OfRecipe, T, WeightRecipe, register_recipe


@register_recipe("low_rank")
class LowRank(OfRecipe):
    """`recipe` beside a branch of low rank in 16 bits, w = Q + up down, with up (N, rank) and down (rank, K).

    The branch is the best approximation of the weight, and takes its largest directions; the codes of `recipe` are of
    the rest. It multiplies the input before that is quantized. So it helps most where weights, or activations that
    `smooth` moves into them, have channels with outliers: W4A4, and 3 bits. It takes 16 rank (N + K) / (N K) bits
    a weight.

    With data, ``calibrated(low_rank(recipe), batches)``, also by the names `gptq` and `auto`, the approximation is that
    of the outputs, and the rest is rounded as the method does. For matrices: not for convolutions, experts, and weights
    stored as (inputs, outputs).

    Args:
        recipe: an inference recipe that looks at no data and does not prune.
        rank: of the branch.
        iterations: the branch is fitted to what the codes leave, and they to what it leaves, so many times; the best
            one is kept.

    Raises:
        ValueError: another recipe; `rank` or `iterations` is less than 1.
    """

    recipe: WeightRecipe
    rank: int = 32
    iterations: int = 1

    def __post_init__(self) -> None:
        inner = self.recipe
        if inner.branch_rank or inner.prunes or inner.trains or inner.data is not None:
            hint = "; data comes outside, calibrated(low_rank(recipe), batches)" if inner.data is not None else ""
            raise ValueError(f"low_rank takes an inference recipe such as int4_weight_only(), got {inner}{hint}")
        if self.rank < 1 or self.iterations < 1:
            raise ValueError(f"low_rank: rank and iterations are 1 or more, got {self.rank} and {self.iterations}")
        super().__post_init__()

    @property
    def branch_rank(self) -> int:  # type: ignore[override]
        return self.rank

    def act_scale(self, device: torch.device) -> Tensor | None:
        return self.recipe.act_scale(device)

    def check_form(self, weight: Tensor) -> None:
        self.recipe.check_form(weight)
        if weight.dim() != 2 or min(weight.shape) <= self.rank:
            raise IndivisibleError(
                f"low_rank takes matrices with more than rank={self.rank} rows and columns, this one has shape "
                f"{tuple(weight.shape)}; give it {self.recipe}, or None, by name"
            )

    def check(self, weight: Tensor) -> None:
        self.check_form(weight)
        self.recipe.check(weight)

    def apply(self, weight: Tensor) -> Tensor:
        def rounded(rest: Tensor) -> Any:
            return self.recipe.apply(rest.to(weight.dtype))

        values = lambda made: made.dequantize(torch.float32)  # noqa: E731
        made, branch = self.fit(weight.float(), weight.dtype, None, rounded, values)
        return self.beside(made, branch)

    def fit(
        self, weight: Tensor, dtype: torch.dtype, root: Tensor | None, rounded: Callable[[Tensor], T],
        values: Callable[[T], Tensor],
    ) -> tuple[T, Branch]:  # fmt: skip
        """The branch, and what is made of the rest, with the least |(W - Q - up down) L|^2."""
        found: list[tuple[float, T, Branch]] = []
        target = weight
        for _ in range(1 if weight.is_meta else self.iterations):
            up, down = low_rank_weight.in_halves(low_rank_weight.low_rank_factors(target, self.rank, root), dtype)
            rest = weight - up.float() @ down.float()
            made = rounded(rest)
            of_codes = values(made)
            error = rest - of_codes if root is None else (rest - of_codes) @ root
            found.append((0.0 if weight.is_meta else float(error.square().sum()), made, (up, down)))
            target = weight - of_codes
        _, made, branch = min(found, key=lambda each: each[0])
        return made, branch

    def beside(self, made: Tensor, branch: Branch | None) -> Tensor:
        assert isinstance(made, QuantizedTensor)
        assert branch is not None
        return LowRankWeight.beside(made, *branch)
