"""GPTQ and coordinate descent for codes that are vectors of 4 columns (`primitives.vector_codebook`).

What `gptq.py` does with a column is done with four at once ("block LDLQ"). With U the upper Cholesky factor of H^-1 and
U_bb its 4 x 4 block for the columns b, the entries c with the least loss given all columns before are found, and those
behind make up for the error:

    c = argmin |e|^2,    e = (w_b - s c) U_bb^-1,        w_k <- w_k - e U_bk   for k behind b

so distances are measured by M = U_bb^-1 U_bb^-T. Descent measures them by H_bb, from w_b* = q_b + (D H)_b H_bb^-1.

Source: QuIP#, arXiv 2402.04396, section 4.1, which measures distances without M.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.vector_codebook import VECTOR, nearest_entries
from .grid import Grid


def order_of(moment: Tensor, by_size: bool) -> Tensor:
    """Columns in the order in which they are rounded, vectors whole; `by_size`: those with the largest inputs first."""
    sizes = moment.diagonal().unflatten(0, (-1, VECTOR)).sum(1)
    places = torch.arange(len(sizes), device=moment.device)
    first = (sizes.argsort(descending=True, stable=True) if by_size else places) * VECTOR
    return (first.unsqueeze(1) + torch.arange(VECTOR, device=moment.device)).flatten()


def round_vectors(weight: Tensor, upper: Tensor, order: Tensor, grid: Grid, block_size: int) -> None:
    """Set the codes of `grid` for `weight` (N, K).

    Args:
        upper: U of the damped H, (K, K), with its columns in this order.
        block_size: columns that are compensated at once.
    """
    rest, places = weight.float()[:, order].t().contiguous(), order.tolist()
    vectors, step = _Vectors(grid), max(VECTOR, block_size // VECTOR * VECTOR)
    for start in range(0, len(rest), step):
        stop = min(start + step, len(rest))
        block, factors = rest[start:stop], upper[start:stop, start:stop]
        errors = torch.empty_like(block)
        for i in range(0, stop - start, VECTOR):
            own, end = slice(i, i + VECTOR), i + VECTOR
            inverse = torch.linalg.inv(factors[own, own])
            values = vectors.take(places[start + i], block[own], inverse @ inverse.t())
            errors[own] = inverse.t() @ (block[own] - values)
            block[end:].addmm_(factors[own, end:].t(), errors[own], alpha=-1)
        rest[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)


def descend(weight: Tensor, moment: Tensor, grid: Grid, sweeps: int, block_size: int) -> None:
    """Each vector in turn to the best entry given all others, in `grid`; H is damped."""
    order = order_of(moment, True)
    places, moment = order.tolist(), moment[order.unsqueeze(1), order]
    vectors, step = _Vectors(grid), max(VECTOR, block_size // VECTOR * VECTOR)
    values = grid.values()[:, order].t().contiguous()
    target = weight.float()[:, order].t()
    for _ in range(sweeps):
        gradient, changed = moment @ (target - values), False
        for start in range(0, len(places), step):
            stop = min(start + step, len(places))
            steps, part, inner = torch.zeros_like(values[start:stop]), gradient[start:stop].clone(), moment[start:stop]
            for i in range(0, stop - start, VECTOR):
                here, own = slice(start + i, start + i + VECTOR), slice(i, i + VECTOR)
                metric, old = inner[own, here], values[here]
                best = old + torch.linalg.solve(metric, part[own])
                found = vectors.take(places[start + i], best, metric, old)
                steps[own] = found - old
                values[here] = found
                part.addmm_(inner[:, here], steps[own], alpha=-1)
            if bool(steps.any()):
                changed = True
                gradient.addmm_(moment[:, start:stop], steps, alpha=-1)
        if not changed:
            break


class _Vectors:
    """Nearest entries for single vectors of a grid, whose scales are taken as they are now."""

    def __init__(self, grid: Grid) -> None:
        self.codes, self.width, self.scale = grid.codes, grid.block[1], grid.scale.float().t()

    def take(self, column: int, wanted: Tensor, metric: Tensor, old: Tensor | None = None) -> Tensor:
        """The values (4, N) nearest to `wanted` (4, N) by `metric` (4, 4) of the vectors that begin in this column,
        which become the codes; rows in which `old` is as near keep it."""
        scale = self.scale[column // self.width]
        codes = nearest_entries((wanted / scale).t(), metric)
        values = codes.t() * scale
        own = self.codes[:, column : column + VECTOR]
        if old is None:
            own.copy_(codes)
            return values
        distances = [((metric @ error) * error).sum(0) for error in (values - wanted, old - wanted)]
        # Rounding errors must not exchange an entry for one that is no better.
        better = distances[0] < distances[1] * (1 - 1e-6)
        own.copy_(torch.where(better.unsqueeze(1), codes, own))
        return torch.where(better, values, old)
