"""observed: static activations with scales from data, weights rounded to nearest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ..recipe import WeightRecipe
from .calibrated import CalibratedRecipe
from .observers import Observer
from .rounding import Nearest


def observed(
    recipe: WeightRecipe,
    batches: Iterable[Any],
    *,
    observer: Observer | str | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    mask: Callable[[Any], Tensor] | None = None,
) -> CalibratedRecipe:
    """`recipe` with the scale of each activation chosen on `batches`, and weights rounded to nearest.

    This is `calibrated` without second moments: it costs little more than running the model.

    Args:
        recipe: with static activations and without a scale: `int8_static_activation_int8_weight()`.
        batches, observer, forward, mask: see `calibrated`.

    Raises:
        ValueError: the recipe has no scale to choose.
    """
    observer = "mse" if observer is None else observer
    return CalibratedRecipe(
        recipe, batches, target=None, rounding=Nearest(), observer=observer, forward=forward, mask=mask
    )
