"""Rounding and Refinement: how the codes of a weight are chosen, given the second moment of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...primitives.jsonable import jsonable
from .grid import Grid


class Rounding:
    """Base class of algorithms that choose all codes of a weight; a frozen, JSON-able dataclass."""

    def round(self, weight: Tensor, moment: Tensor, grid: Grid) -> float:
        """Set the codes of `grid` for `weight` (N, K), fp32, and E[x x^T] (K, K).

        Returns:
            The damping that was used.
        """
        raise NotImplementedError


class Refinement:
    """Base class of algorithms that improve a rounded weight; a frozen, JSON-able dataclass.

    tr(D H D^T) of the result is never larger than before, for the damped H.
    """

    def refine(self, weight: Tensor, moment: Tensor, grid: Grid) -> Grid:
        """`grid` with better codes or scales for `weight` (N, K) and the damped second moment (K, K)."""
        raise NotImplementedError


@jsonable
@dataclass(frozen=True)
class Nearest(Rounding):
    """Each element to its nearest value."""

    def round(self, weight: Tensor, moment: Tensor, grid: Grid) -> float:
        grid.codes = grid.nearest(weight)
        return 0.0
