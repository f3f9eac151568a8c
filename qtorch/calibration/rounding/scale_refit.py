"""Scale refit: the scales that are best for the codes, in closed form.

A row of the quantized weight is q = sum_g s_g c_g + o, with c_g the codes of group g (zero elsewhere). So
tr(D H D^T) is quadratic in the scales s (G,) of the row, and least where

    A s = b,    A_gh = c_g H c_h^T,    b_g = (w - o) H c_g^T
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...primitives.jsonable import jsonable
from .base import Refinement
from .grid import Grid
from .quadratic import loss

_ELEMENTS = 1 << 24
"""Of the products c_g H, of all rows that are solved at once."""


@jsonable
@dataclass(frozen=True)
class ScaleRefit(Refinement):
    """Least-squares scales, taken by rows where the scales as stored lower the loss. One row has its own scales.

    Args:
        ridge: added to the diagonal of A, relative to its mean.
        most: a scale changes at most by this factor.
    """

    ridge: float = 1e-4
    most: float = 3.0

    def refine(self, weight: Tensor, moment: Tensor, grid: Grid) -> Grid:
        rows, width = grid.block
        if rows != 1 or "scale_scale" in grid.stored:
            return grid  # a scale of several rows, or one that is quantized itself, is not free
        old = grid.scale.float()
        multipliers, offsets = grid.linear_terms()
        solved = self._solve(weight.float() - offsets, moment, multipliers, old, width)
        refitted = grid.with_scale(solved)
        before = loss(weight.float() - grid.values(), moment)
        after = loss(weight.float() - refitted.values(), moment)
        scale = torch.where((after < before).unsqueeze(1), refitted.scale, grid.scale)
        return grid.with_scale(scale)

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


scale_refit = ScaleRefit
