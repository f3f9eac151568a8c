"""auto: the combination of algorithms that lost least in our measurements (docs/guides/calibration)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ..recipe import WeightRecipe
from .calibrated import CalibratedRecipe
from .rounding import AutoRound, Descent, FloatTarget, Gptq, ScaleRefit, ScaleSearch
from .transforms import Transform


def auto(
    recipe: WeightRecipe,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    mask: Callable[[Any], Tensor] | None = None,
    learn: AutoRound | None = None,
    transforms: Sequence[Transform] = (),
    strict: bool = False,
) -> CalibratedRecipe:
    """GPTQ against the outputs of the float model, then coordinate descent and scale refits in turn.

    All of it is done with the scales of the recipe and with those of a search, and each row takes the better one.

    Args:
        learn: `AutoRound()` improves all weights of a block together in the end; it takes several times as long.
        recipe, batches, forward, mask, transforms, strict: see `calibrated`.
    """
    refine = (Descent(), ScaleRefit(), Descent(), ScaleRefit(), Descent())
    return CalibratedRecipe(
        recipe,
        batches,
        FloatTarget(),
        scales=ScaleSearch(),
        rounding=Gptq(),
        refine=refine,
        learn=learn,
        transforms=tuple(transforms),
        forward=forward,
        mask=mask,
        strict=strict,
    )
