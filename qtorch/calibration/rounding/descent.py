"""Coordinate descent: each element in turn to the value that is best given all others.

With the error D = W - Q of a weight (N, K), the loss tr(D H D^T) as a function of column j alone is least at

    q_j + (D H)_j / H_jj

so the nearest value to that is the best one. All rows are done at once; columns by decreasing H_jj.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...primitives.jsonable import jsonable
from .base import Refinement
from .grid import Grid


@jsonable
@dataclass(frozen=True)
class Descent(Refinement):
    """Coordinate descent on the codes.

    Args:
        sweeps: passes over all columns.
        block_size: columns after which the gradient of all others is updated.
    """

    sweeps: int = 3
    block_size: int = 128

    def refine(self, weight: Tensor, moment: Tensor, grid: Grid) -> Grid:
        grid = grid.copy()
        order = moment.diagonal().argsort(descending=True, stable=True)
        places = order.tolist()
        moment = moment[order.unsqueeze(1), order]
        diagonal = moment.diagonal().tolist()
        columns = grid.columns()
        values = grid.values()[:, order].t().contiguous()  # (K, N): columns as contiguous rows
        target = weight.float()[:, order].t()
        for _ in range(self.sweeps):
            gradient = moment @ (target - values)
            changed = False
            for start in range(0, len(places), self.block_size):
                stop = min(start + self.block_size, len(places))
                steps = torch.zeros_like(values[start:stop])
                part, inner = gradient[start:stop].clone(), moment[start:stop, start:stop]
                for i in range(stop - start):
                    j = start + i
                    best = values[j] + part[i] / diagonal[j]
                    codes, found = columns.nearest(places[j], best)
                    # Rounding errors of the gradient must not exchange a value for one that is no better.
                    better = (found - best).abs() < (values[j] - best).abs()
                    steps[i] = torch.where(better, found - values[j], 0.0)
                    values[j] = torch.where(better, found, values[j])
                    grid.codes[:, places[j]] = torch.where(better, codes, grid.codes[:, places[j]])
                    part.addr_(inner[:, i], steps[i], alpha=-1)
                if bool(steps.any()):
                    changed = True
                    gradient.addmm_(moment[:, start:stop], steps, alpha=-1)
            if not changed:
                break
        return grid


descent = Descent
