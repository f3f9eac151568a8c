"""GPTQ: codes column by column; the error of a column is compensated by the columns that are not rounded yet.

For each column j, with U the upper Cholesky factor of H^-1 (H = U^-1 U^-T),

    e = (w_j - q_j) / U_jj,        w_k <- w_k - e U_jk   for k > j

The scales are chosen before, from all of the weight, so they are never stale, whatever the order of the columns.

Source: GPTQ, arXiv 2210.17323, algorithm 1; the order by decreasing diagonal of H is that of its authors' code
("act-order").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...primitives.jsonable import jsonable
from .base import Rounding
from .grid import Grid
from .quadratic import factor, inverse_


@jsonable
@dataclass(frozen=True)
class Gptq(Rounding):
    """Rounding by GPTQ.

    Args:
        damping: added to the diagonal of H, relative to its mean; raised where the factorization fails.
        act_order: columns with the largest inputs first.
        block_size: columns that are compensated at once.

    Raises:
        ValueError: `damping` is negative, or `block_size` less than 1.
    """

    damping: float = 0.01
    act_order: bool = True
    block_size: int = 128

    def __post_init__(self) -> None:
        if self.damping < 0 or self.block_size < 1:
            raise ValueError(f"gptq: damping is 0 or more and block_size 1 or more, got {self}")

    def round(self, weight: Tensor, moment: Tensor, grid: Grid) -> float:
        count = weight.shape[1]
        order = torch.arange(count, device="cpu")
        if self.act_order:
            order = moment.diagonal().argsort(descending=True, stable=True)
        damping, upper = self._factor(moment, order)
        rest = weight.float()[:, order].t().contiguous()  # columns as rows, which are contiguous
        columns, places = grid.columns(), order.tolist()
        for start in range(0, count, self.block_size):
            stop = min(start + self.block_size, count)
            block, factors = rest[start:stop], upper[start:stop, start:stop]
            errors = torch.empty_like(block)
            diagonal = factors.diagonal().tolist()
            for i in range(stop - start):
                codes, values = columns.nearest(places[start + i], block[i])
                grid.codes[:, places[start + i]] = codes
                errors[i] = (block[i] - values) / diagonal[i]
                block[i + 1 :].addr_(factors[i, i + 1 :], errors[i], alpha=-1)
            rest[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
        return damping

    def _factor(self, moment: Tensor, order: Tensor) -> tuple[float, Tensor]:
        """The damping used, and U of the damped H with its columns in this order.

        All steps work in one matrix (K, K): they are the largest of all.
        """
        lower, damping = factor(moment, self.damping, order)
        result = inverse_(lower)
        return damping, torch.linalg.cholesky(result, upper=True, out=result)
