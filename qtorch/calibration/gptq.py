"""gptq: the rounding algorithm, and the recipe that rounds by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

from torch import Tensor, nn

from ..recipe import WeightRecipe
from .calibrated import CalibratedRecipe
from .rounding import Gptq
from .transforms import Transform


@overload
def gptq(*, damping: float = ..., act_order: bool = ..., block_size: int = ...) -> Gptq: ...


@overload
def gptq(
    recipe: WeightRecipe,
    batches: Iterable[Any],
    *,
    damping: float = ...,
    act_order: bool = ...,
    block_size: int = ...,
    forward: Callable[[nn.Module, Any], Any] | None = ...,
    mask: Callable[[Any], Tensor] | None = ...,
    transforms: Sequence[Transform] = ...,
    strict: bool = ...,
) -> CalibratedRecipe: ...


def gptq(
    recipe: WeightRecipe | None = None,
    batches: Iterable[Any] | None = None,
    *,
    damping: float = 0.01,
    act_order: bool = True,
    block_size: int = 128,
    **options: Any,
) -> Gptq | CalibratedRecipe:
    """`recipe` with codes chosen by GPTQ on `batches`; without them, the algorithm, for `calibrated(rounding=...)`.

    Args:
        recipe, batches, options: see `calibrated`. The weight itself is rounded, not the float target.
        damping, act_order, block_size: see `Gptq`.

    Raises:
        ValueError: one of `recipe` and `batches` is missing.
    """
    rounding = Gptq(damping, act_order, block_size)
    if recipe is None and batches is None and not options:
        return rounding
    if recipe is None or batches is None:
        raise ValueError("gptq: takes a recipe and batches, gptq(int4_weight_only(), batches), or neither")
    return CalibratedRecipe(recipe, batches, target=None, rounding=rounding, **options)
