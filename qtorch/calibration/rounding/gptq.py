"""GPTQ: codes column by column; the error of a column is compensated by the columns that are not rounded yet.

For each column j, with U the upper Cholesky factor of H^-1 (H = U^-1 U^-T),

    e = (w_j - q_j) / U_jj,        w_k <- w_k - e U_jk   for k > j

The scales are chosen before, from all of the weight, so they are never stale, whatever the order of the columns.

Codes that are vectors of 4 columns (`primitives.vector_spec`) are chosen four columns at once ("block LDLQ"); with
U_bb the 4 x 4 block of U for the columns b, the entries c with the least loss given all columns before are found, and
those behind make up for the error:

    c = argmin |e|^2,    e = (w_b - s c) U_bb^-1,        w_k <- w_k - e U_bk   for k behind b

so distances are measured by M = U_bb^-1 U_bb^-T. Descent measures them by H_bb, from w_b* = q_b + (D H)_b H_bb^-1.

Sources: GPTQ, arXiv 2210.17323, algorithm 1; the order by decreasing diagonal of H is that of its authors' code
("act-order"). Vectors: QuIP#, arXiv 2402.04396, section 4.1, which measures distances without M.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ...primitives.jsonable import jsonable
from ...primitives.vector_spec import VECTOR, VectorSpec, nearest_entries
from .grid import Columns, Grid, Refinement, Rounding, factor


@jsonable
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

    def damped(self, factor: float) -> "Gptq":
        return replace(self, damping=factor * self.damping)

    def round(self, weight: Tensor, moment: Tensor, *grids: Grid) -> float:
        if isinstance(grids[0].spec, VectorSpec):
            order, choose = order_of_vectors(moment, self.act_order), _round_vectors
        else:
            order, choose = torch.arange(weight.shape[1], device="cpu"), _round_columns
            if self.act_order:
                order = moment.diagonal().argsort(descending=True, stable=True)
        damping, upper = self._factor(moment, order)
        for grid in grids:
            choose(weight, upper, order, grid, self.block_size)
        return damping

    def _factor(self, moment: Tensor, order: Tensor) -> tuple[float, Tensor]:
        """The damping used, and U of the damped H with its columns in this order.

        All steps work in one matrix (K, K): they are the largest of all.
        """
        lower, damping = factor(moment, self.damping, order)
        result = torch.cholesky_inverse(lower, out=lower)
        return damping, torch.linalg.cholesky(result, upper=True, out=result)


@jsonable
class Descent(Refinement):
    """Coordinate descent on the codes: each element in turn to the value that is best given all others.

    With the error D = W - Q of a weight (N, K), the loss tr(D H D^T) as a function of column j alone is least at
    q_j + (D H)_j / H_jj, so the nearest value to that is the best one. All rows are done at once; columns by
    decreasing H_jj.

    Args:
        sweeps: passes over all columns.
        block_size: columns after which the gradient of all others is updated.
    """

    sweeps: int = 3
    block_size: int = 128

    def refine(self, weight: Tensor, moment: Tensor, grid: Grid) -> Grid:
        grid = grid.copy()
        if isinstance(grid.spec, VectorSpec):
            _descend_vectors(weight, moment, grid, self.sweeps, self.block_size)
            return grid
        order = moment.diagonal().argsort(descending=True, stable=True)
        places = order.tolist()
        moment = moment[order.unsqueeze(1), order]
        diagonal = moment.diagonal().tolist()
        columns = Columns(grid)
        values, codes = (kept[:, order].t().contiguous() for kept in (grid.values(), grid.codes))  # columns as rows
        target = weight.float()[:, order].t()
        for _ in range(self.sweeps):
            gradient = moment @ (target - values)
            changed = False
            for start in range(0, len(places), self.block_size):
                stop = min(start + self.block_size, len(places))
                steps = torch.zeros_like(values[start:stop])
                part, inner = gradient[start:stop].clone(), moment[start:stop, start:stop]
                own = (part, values[start:stop], codes[start:stop], steps)
                for i, (slope, value, code, step) in enumerate(zip(*(rows.unbind() for rows in own))):
                    best = value + slope / diagonal[start + i]
                    found_code, found = columns.nearest(places[start + i], best)
                    # Rounding errors of the gradient must not exchange a value for one that is no better.
                    better = (found - best).abs_() < (value - best).abs_()
                    torch.mul(found - value, better, out=step)
                    torch.where(better, found, value, out=value)
                    torch.where(better, found_code, code, out=code)
                    part[i + 1 :].addr_(inner[i + 1 :, i], step, alpha=-1)
                if bool(steps.any()):
                    changed = True
                    gradient.addmm_(moment[:, start:stop], steps, alpha=-1)
            if not changed:
                break
        grid.codes[:, order] = codes.t()
        return grid


def _round_columns(weight: Tensor, upper: Tensor, order: Tensor, grid: Grid, block_size: int) -> None:
    """Set the codes of `grid` for `weight` (N, K).

    Args:
        upper: U of the damped H, (K, K), with its columns in this order.
        block_size: columns that are compensated at once.
    """
    rest = weight.float()[:, order].t().contiguous()  # columns as rows, which are contiguous
    columns, places = Columns(grid), order.tolist()
    for start in range(0, len(rest), block_size):
        stop = min(start + block_size, len(rest))
        block, factors = rest[start:stop], upper[start:stop, start:stop]
        errors = torch.empty_like(block)
        diagonal = factors.diagonal().tolist()
        for i, (wanted, error) in enumerate(zip(block.unbind(), errors.unbind())):
            grid.codes[:, places[start + i]], values = columns.nearest(places[start + i], wanted)
            torch.sub(wanted, values, out=error).div_(diagonal[i])
            block[i + 1 :].addr_(factors[i, i + 1 :], error, alpha=-1)
        rest[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)


def order_of_vectors(moment: Tensor, by_size: bool) -> Tensor:
    """Columns in the order in which they are rounded, vectors whole; `by_size`: those with the largest inputs first."""
    sizes = moment.diagonal().unflatten(0, (-1, VECTOR)).sum(1)
    places = torch.arange(len(sizes), device=moment.device)
    first = (sizes.argsort(descending=True, stable=True) if by_size else places) * VECTOR
    return (first.unsqueeze(1) + torch.arange(VECTOR, device=moment.device)).flatten()


def _round_vectors(weight: Tensor, upper: Tensor, order: Tensor, grid: Grid, block_size: int) -> None:
    """`_round_columns` for vectors."""
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


def _descend_vectors(weight: Tensor, moment: Tensor, grid: Grid, sweeps: int, block_size: int) -> None:
    """Each vector in turn to the best entry given all others, in `grid`; H is damped."""
    order = order_of_vectors(moment, True)
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


@jsonable
class FloatTarget:
    """Round against the outputs of the float model: the weight W* whose output on the inputs of the quantized model is
    nearest to the float model's output.

    With X the inputs of a layer in the float model, X~ those in the model as quantized so far, G = X^T X~, H = X~^T X~,

        |X W^T - X~ Q^T|^2 = |X~ (W* - Q)^T|^2 + constant,    W* = W G H^-1 = W + W (G - H) H^-1

    so any algorithm that rounds W* with H rounds against the outputs of the float model. H is damped. Where the output
    of the layer is added to a residual stream, R in the float model and R~ in the quantized one, W* gains
    (R - R~)^T X~ H^-1 to make up for what the stream lacks.

    Args:
        strength: 0 keeps the weight, 1 is W*; between them the correction is scaled.
        damping: of H, relative to the mean of its diagonal.
        residual: make up for the error of the residual stream, in layers that write into it.

    Raises:
        ValueError: `strength` is not in [0, 1], or `damping` is negative.
    """

    strength: float = 1.0
    damping: float = 0.01
    residual: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1 or self.damping < 0:
            raise ValueError(f"float_target: strength lies in [0, 1] and damping is 0 or more, got {self}")

    def damped(self, factor: float) -> "FloatTarget":
        """The same with so many times the damping."""
        return replace(self, damping=factor * self.damping)

    def of(self, weight: Tensor, moment: Tensor, cross: Tensor, residual: Tensor | None = None) -> Tensor:
        """W + strength * (W (G - H) + D) H^-1, (N, K) fp32.

        Args:
            weight: W (N, K).
            moment: H = E[x~ x~^T], (K, K).
            cross: G = E[x x~^T], (K, K).
            residual: D = E[(r - r~) x~^T], (N, K).
        """
        weight = weight.float()
        correction = weight @ (cross.float() - moment.float())
        if residual is not None and self.residual:
            correction += residual.float()
        lower, _ = factor(moment, self.damping)
        return weight + self.strength * torch.cholesky_solve(correction.t(), lower).t()
