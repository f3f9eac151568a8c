"""EdgeRecipe: the first and the last weight of a model have more bits than those between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...recipe import Recipe
from .base import TrainingRecipe


class EdgeRecipe(TrainingRecipe):
    """A recipe for weights between the first and the last one; these two are trained by `at_edge()`.

    Attributes:
        edge_bits: of the first and the last weight; None: as all others.
    """

    edge_bits: int | None

    def at_edge(self) -> Recipe:
        """The recipe of the first and the last weight."""
        raise NotImplementedError

    def placed(self, index: int, count: int) -> Recipe:
        if self.edge_bits is not None and index in (0, count - 1):
            return self.at_edge()
        inside: Any = self
        return replace(inside, edge_bits=None)
