"""Scale search: for each block, the factor of its scale with the least error of rounding to nearest.

    f = argmin_f sum_k h_k (w_k - dequantize(quantize(w_k; f s)))^2        over the elements k of the block

with h_k = E[x_k^2] of the inputs, or 1. Factors below 1 clip. Above 1 they help floating-point codes, whose largest
steps are far apart: with f = 6/4 the largest element of a block of e2m1 becomes 4 instead of 6, and what lies near it
gets finer steps ("four over six", arXiv 2512.02010).

GPTQ moves what it rounds, so scales that are best for rounding to nearest may clip too much for it: they made a small
Llama worse. With `compare`, codes are therefore chosen with the searched scales and with those of the recipe, and each
row takes the better of the two.
"""

import torch
from torch import Tensor

from ...primitives.jsonable import jsonable
from ...primitives.scale_rules import elements_last
from .grid import Grid, Refinement, loss


@jsonable
class ScaleSearch:
    """Search the scale of each block before codes are chosen.

    Args:
        factors: tried in this order; 1 is always tried first.
        importance: weight the error by the mean squares of the inputs.
        compare: choose codes with both scales, and take the better row.
        tokens: for each input of the layer; with fewer, the scales of the recipe stay.

    Raises:
        ValueError: a factor is not positive.
    """

    factors: tuple[float, ...] = tuple(1 - 0.7 * step / 40 for step in range(1, 41))
    importance: bool = True
    compare: bool = True
    tokens: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        if not self.factors or min(self.factors) <= 0:
            raise ValueError(f"scale_search: factors are positive, got {self.factors}")

    def starts(self, weight: Tensor, moment: Tensor, grid: Grid) -> list[Grid]:
        """The grids with which codes are to be chosen."""
        found = self.search(weight, moment, grid)
        return [grid, found] if self.compare else [found]

    def search(self, weight: Tensor, moment: Tensor, grid: Grid) -> Grid:
        """`grid` with the best scales, as they are stored, and the nearest codes.

        Args:
            weight: (N, K) fp32.
            moment: (K, K), E[x x^T].
        """
        importance = moment.diagonal() if self.importance else None
        best, best_error = grid.scale, self._errors(weight, grid, importance)
        for factor in self.factors:
            candidate = grid.with_scale(grid.scale.float() * factor)
            candidate.codes = candidate.nearest(weight)
            error = self._errors(weight, candidate, importance)
            better = error < best_error
            best = torch.where(better, candidate.scale, best)
            best_error = torch.where(better, error, best_error)
        found = grid.with_scale(best)
        found.codes = found.nearest(weight)
        return found

    def _errors(self, weight: Tensor, grid: Grid, importance: Tensor | None) -> Tensor:
        """Of each block, in the shape of the scale."""
        squares = (weight - grid.values()).square()
        if importance is not None:
            squares = squares * importance
        blocks, shape = elements_last(squares, grid.spec)  # type: ignore[arg-type]
        return blocks.sum(-1).reshape(shape)


def four_over_six() -> ScaleSearch:
    """For e2m1 codes: the largest element of a block may become 4 instead of 6."""
    return ScaleSearch(factors=(1.5,), importance=False)


_ELEMENTS = 1 << 24
"""Of the products c_g H, of all rows that are solved at once."""


@jsonable
class ScaleRefit(Refinement):
    """Least-squares scales, taken by rows where the scales as stored lower the loss. One row has its own scales.

    A row of the quantized weight is q = sum_g s_g c_g + o, with c_g the codes of group g (zero elsewhere). So
    tr(D H D^T) is quadratic in the scales s (G,) of the row, and least where

        A s = b,    A_gh = c_g H c_h^T,    b_g = (w - o) H c_g^T

    Args:
        ridge: added to the diagonal of A, relative to its mean.
        most: a scale changes at most by this factor.
    """

    ridge: float = 1e-4
    most: float = 3.0

    def refine(self, weight: Tensor, moment: Tensor, grid: Grid) -> Grid:
        rows, width = grid.block
        if rows != 1:
            return grid  # a scale of several rows is not free
        old = grid.scale.float()
        multipliers, offsets = grid.linear_terms()
        solved = self._solve(weight.float() - offsets, moment, multipliers, old, width)
        refitted = grid.with_scale(solved)
        before = loss(weight.float() - grid.values(), moment)
        after = loss(weight.float() - refitted.values(), moment)
        chosen = grid.with_scale(torch.where((after < before).unsqueeze(1), refitted.scale, grid.scale))
        # Scales that are quantized themselves change with those of other rows.
        return chosen if float(loss(weight.float() - chosen.values(), moment).sum()) <= float(before.sum()) else grid

    def _solve(self, target: Tensor, moment: Tensor, multipliers: Tensor, old: Tensor, width: int) -> Tensor:
        """The scales (N, G); those of `old` where the least squares ones are too far away."""
        count, groups = multipliers.shape[1], old.shape[1]
        with_target = target @ moment
        result = old.clone()
        step = max(1, _ELEMENTS // (count * groups))
        for start in range(0, len(multipliers), step):
            part = slice(start, start + step)
            codes = multipliers[part].unflatten(1, (groups, width))
            # (rows, G, K): each group's codes times its rows of H
            products = torch.einsum("ngw,gwk->ngk", codes, moment.unflatten(0, (groups, width)))
            a = (products.unflatten(2, (groups, width)) * codes.unsqueeze(1)).sum(-1)
            b = (codes * with_target[part].unflatten(1, (groups, width))).sum(-1)
            diagonal = a.diagonal(dim1=1, dim2=2)
            diagonal += self.ridge * diagonal.mean(1, keepdim=True) + torch.finfo(a.dtype).tiny
            scales, failed = torch.linalg.solve_ex(a, b)
            near = (scales > old[part] / self.most) & (scales < old[part] * self.most)
            result[part] = torch.where(near & (failed == 0).unsqueeze(1), scales, old[part])
        return result
