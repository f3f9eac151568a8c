"""transformed: a model with the float weights that the transforms of its recipes make, while it is quantized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from .install import all_or_nothing, restored
from .recipe import Recipe
from .report import TransformReport
from .targets import Target


@contextmanager
def transformed(
    model: nn.Module, targets: Sequence[Target[Recipe]], keep: bool
) -> Iterator[tuple[TransformReport, ...]]:
    """Apply the transforms of the recipes of `targets`, once for the whole model; `targets` get the new parameters.

    An exception restores all modules; without `keep` they are restored in any case.

    Raises:
        ValueError: recipes have different transforms, or the same ones with different data.
    """
    recipes = [target.recipe for target in targets if target.recipe is not None and target.recipe.transforms]
    if not recipes:
        yield ()
        return
    first = recipes[0]
    for other in recipes[1:]:
        same_data = first.data is not None and other.data is not None and first.data.batches is other.data.batches
        if tuple(other.transforms) != tuple(first.transforms) or not same_data:
            raise ValueError(
                "quantize_: transforms change the whole model: all recipes that have any take the same ones, and the "
                "same data; the model is unchanged"
            )
    with (all_or_nothing if keep else restored)(model.modules()):
        reports = first.transform(model, targets)
        for target in targets:
            for slot in target.slots:
                parameter = slot.module._parameters[slot.attribute]
                assert parameter is not None
                slot.parameter = parameter
        yield reports
