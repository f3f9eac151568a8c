"""Work: what transforms share: the model, its graph, its parameters, the data, and the recipes of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...recipe import WeightRecipe
from ...statistics import Data
from .folds import Fold, Refusal, find_folds
from .graph import ModelGraph
from .parameters import Parameters
from .verify import TOLERANCE, difference, find_wrong, outputs

CHUNK_BYTES = 1 << 30
"""Size of the parameters in fp32 that are replaced at a time to verify folds."""


class Work:
    """The model that transforms change, by replacing its parameters.

    Attributes:
        recipes: name of a parameter -> the recipe that it will be quantized by.
        batches: of the data.
    """

    def __init__(self, model: nn.Module, data: Data, recipes: Mapping[str, WeightRecipe]) -> None:
        self.model = model
        self.data = data
        self.recipes = recipes
        self.batches: list[Any] = data.checked()
        self.parameters = Parameters(model)

    @cached_property
    def graph(self) -> ModelGraph:
        """Raises `ExportFailed`."""
        return ModelGraph(self.model, self.data, self.batches[0])

    @cached_property
    def reference(self) -> list[Tensor]:
        """The outputs of the model for the first batch, before any transform."""
        return self._outputs()

    def difference(self) -> float:
        """How far the outputs are from those of the model before any transform."""
        return difference(self.reference, self._outputs())

    def _outputs(self) -> list[Tensor]:
        return outputs(self.model, self.data, self.batches[0])

    @cached_property
    def _found(self) -> tuple[list[Fold], list[Refusal]]:
        return find_folds(self.graph)

    @property
    def all_folds(self) -> list[Fold]:
        """All folds of the model, not tried."""
        return self._found[0]

    @property
    def refusals(self) -> list[Refusal]:
        """Places that cannot be scaled."""
        return self._found[1]

    @cached_property
    def wrong(self) -> list[Fold]:
        """Folds that change the outputs, with random powers of two as scales, which round nothing."""
        wrong: list[Fold] = []
        for chunk in self._chunks(self._wanted):
            wrong += find_wrong(chunk, self._differ)
        return wrong

    @property
    def folds(self) -> list[Fold]:
        """The folds of weights that will be quantized, each tried."""
        return [fold for fold in self._wanted if fold not in self.wrong]

    @property
    def _wanted(self) -> list[Fold]:
        return [fold for fold in self.all_folds if not fold.consumers.keys().isdisjoint(self.recipes)]

    def _chunks(self, folds: Sequence[Fold]) -> list[list[Fold]]:
        chunks: list[list[Fold]] = [[]]
        size = 0
        for fold in folds:
            size += sum(4 * self.parameters[name].numel() for name in fold.labels)
            if size > CHUNK_BYTES and chunks[-1]:
                chunks.append([])
                size = 0
            chunks[-1].append(fold)
        return chunks

    def _differ(self, folds: Sequence[Fold]) -> bool:
        """Whether random scales in these folds change the outputs."""
        assert self.reference
        with ExitStack() as stack:
            for fold in folds:
                scales = probe(fold.scales)
                stack.enter_context(self.parameters.replaced(fold.values(self.parameters, scales)))
            return not self.difference() <= TOLERANCE

    def tolerance(self, names: Sequence[str]) -> float:
        """The difference that rounding new values of these parameters to their dtype may make."""
        eps = max((torch.finfo(self.parameters[name].dtype).eps for name in names), default=0.0)
        return max(TOLERANCE, 8 * eps)


def probe(count: int) -> Tensor:
    """(count,) random scales that make any wrong fold visible: 1/4, 1/2, 2 or 4."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.tensor([-2.0, -1.0, 1.0, 2.0], dtype=torch.float64, device="cpu")
    return exponents[torch.randint(4, (count,), generator=generator, device="cpu")].exp2()
