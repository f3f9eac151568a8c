"""Grid: the values that the elements of a weight can take once its scales are chosen, and the codes taken so far.

The algorithms of this package choose codes column by column, and need no more of a number format than the nearest value
of a column: integers, low-bit floats and look-up tables are rounded by the same code. They lessen the error of the
output. For inputs X (M, K) and the error D = W - Q (N, K) of the weight it is

    |X W^T - X Q^T|^2 / M = sum_n d_n H d_n^T = tr(D H D^T),    H = X^T X / M

H is singular where inputs are linearly dependent, so it is damped: H + damping * mean(diag H) * I.

Source: GPTQ, arXiv 2210.17323, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...dtypes import QuantizedTensor, quantized_type
from ...primitives import CodebookSpec, LinearSpec, PerBlock, QuantSpec, Scheme, affine, double_quant, jsonable


@dataclass
class Grid:
    """The values that a weight (N, K) of a logical dtype can take under `spec`, and its codes. `stored` has the tensors
    of the scale as they are stored (see `primitives.double_quant`), and of zero points that are quantized too; `other`
    zero points as numbers or codes, one per block, or tables; where `mask` (N, K) is false, elements are zero."""

    spec: QuantSpec | CodebookSpec
    dtype: torch.dtype
    stored: Mapping[str, Tensor]
    other: Tensor | None
    codes: Tensor
    mask: Tensor | None = None

    @classmethod
    def of(
        cls, weight: Tensor, spec: Any, dtype: torch.dtype, importance: Tensor | None = None, mask: Tensor | None = None
    ) -> Grid:
        """The grid that `spec` chooses for `weight` (N, K), with the nearest codes; groups have scales of `dtype`, and
        tables that are fitted by k-means weight columns by `importance` (K,)."""
        weight = (weight if mask is None else torch.where(mask, weight, 0)).to(dtype)
        other: Tensor | None
        if isinstance(spec, CodebookSpec):
            stored = double_quant.quantize_scale(spec.choose_scale(weight), spec.scale_spec)
            weights = None if importance is None or spec.table is not None else importance.expand_as(weight)
            other = spec.choose_table(weight, double_quant.dequantize_scale(stored, spec.scale_spec), weights)
        else:
            stored, other = spec.choose_stored_qparams(weight)
            if other is not None and spec.quantizes_zero_points:
                stored = {**stored, "zero_point": other}
                other = spec.dense_qparams(stored, other)[1]
        grid = cls(spec, dtype, stored, other, torch.empty(0, dtype=torch.float32, device="cpu"), mask)
        grid.codes = grid.nearest(weight)
        return grid

    def nearest(self, weight: Tensor) -> Tensor:
        """The codes nearest to `weight` (N, K), zeros where it is pruned."""
        weight = weight if self.mask is None else torch.where(self.mask, weight, 0)
        return self.spec.quantize(weight.to(self.dtype), self.scale, self.other)  # type: ignore[arg-type]

    @property
    def scale(self) -> Tensor:
        """The scale in floating point, one element per block."""
        return double_quant.dequantize_scale(self.stored, self.spec.scale_spec)

    @property
    def block(self) -> tuple[int, ...]:
        """Rows and columns of a block."""
        return tuple(self.spec.block_size(self.codes.shape))

    def values(self) -> Tensor:
        """(N, K) fp32: what the codes stand for."""
        return self.spec.dequantize(self.codes, self.scale, self.other)  # type: ignore[arg-type]

    def with_scale(self, scale: Tensor) -> Grid:
        """The same codes with another scale, rounded to the form in which scales are stored."""
        stored = double_quant.quantize_scale(scale.to(self.scale.dtype), self.spec.scale_spec)
        return replace(self, stored={**self.stored, **stored})

    @property
    def has_own_rows(self) -> bool:
        """Whether each row has scales, and zero points, that no other row shares, but for the scales of scales."""
        return isinstance(self.spec, QuantSpec) and self.block[0] == 1 and not self.spec.quantizes_zero_points

    def with_rows(self, rows: Tensor, of: Grid) -> Grid:
        """Some rows, (N,) bool, from another grid of the same spec; for grids that have their own rows."""
        rows = rows.unsqueeze(1)
        other = None if self.other is None or of.other is None else torch.where(rows, of.other, self.other)
        scaled = self.with_scale(torch.where(rows, of.scale, self.scale))
        return replace(scaled, other=other, codes=torch.where(rows, of.codes, self.codes))

    def copy(self) -> Grid:
        """A grid with codes of its own."""
        return replace(self, codes=self.codes.clone())

    def linear_terms(self) -> tuple[Tensor, Tensor]:
        """(multipliers, offsets), (N, K) fp32: value = multiplier * scale + offset for each element."""
        ones, spec = torch.ones_like(self.scale, dtype=torch.float32), self.spec
        if isinstance(spec, QuantSpec) and spec.zero_point_domain.adds_zero_point and self.other is not None:
            offset = spec.dequantize(self.codes, torch.zeros_like(ones), self.other)
            return spec.dequantize(self.codes, ones, torch.zeros_like(self.other)), offset
        multiplier = spec.dequantize(self.codes, ones, self.other)  # type: ignore[arg-type]
        return multiplier, torch.zeros_like(multiplier)

    def quantized(self, linear: LinearSpec) -> QuantizedTensor:
        """The codes as a quantized tensor."""
        name = "table" if isinstance(self.spec, CodebookSpec) else "zero_point"
        others = dict(self.stored)
        if self.other is not None:
            others.setdefault(name, self.other)
        scheme = Scheme(linear, tuple(self.codes.shape), self.dtype)
        return quantized_type(linear.weight).from_canonical(self.codes, others, scheme)


class Columns:
    """Nearest values of single columns of a grid, whose scales are taken as they are now.

    They are asked for each column of each sweep, so scales lie ready in fp32, in a row for the blocks of a column.
    """

    def __init__(self, grid: Grid) -> None:
        rows, self.width = grid.block
        # For a codebook, one element is one block here.
        self.spec: Any = replace(grid.spec, granularity=PerBlock((1, 1)), scale_spec=None)
        self.scale = grid.scale.repeat_interleave(rows, 0).float().t().contiguous()
        self.other, self.mask = grid.other, grid.mask
        if self.other is not None and self.other.dim() > 1:  # else one table for all blocks
            self.other = self.other.repeat_interleave(rows, 0).float().transpose(0, 1).contiguous()

    def nearest(self, column: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """(codes, what they stand for in fp32), both (N,), nearest to `values` (N,) in this column."""
        if self.mask is not None:
            values = torch.where(self.mask[:, column], values, 0)
        group = column // self.width
        scale = self.scale[group]
        other: Any = self.other if self.other is None or self.other.dim() == 1 else self.other[group]
        if isinstance(self.spec, QuantSpec):
            kind, domain, bounds = self.spec.dtype, self.spec.zero_point_domain, self.spec.code_range
            reals = affine.real_codes(values, scale, other, kind, bounds, domain, self.spec.rounding)
            codes = kind.encode(reals.clamp(*bounds))
            return codes, affine.dequantize_split(kind.decode(codes), scale, other, bounds, domain)
        scale, other = scale.unsqueeze(1), other if other.dim() == 1 else other.unsqueeze(1)
        codes = self.spec.quantize(values.unsqueeze(1), scale, other)
        return codes.squeeze(1), self.spec.dequantize(codes, scale, other).squeeze(1)


class Rounding:
    """Base class of algorithms that choose all codes of a weight; a frozen, JSON-able dataclass."""

    def round(self, weight: Tensor, moment: Tensor, *grids: Grid) -> float:
        """Set the codes of each of `grids` for `weight` (N, K), fp32, and E[x x^T] (K, K).

        Returns:
            The damping that was used.
        """
        raise NotImplementedError

    def damped(self, factor: float) -> Rounding:
        """The same with so many times the damping, if it damps."""
        return self


class Refinement:
    """Base class of algorithms that improve a rounded weight; a frozen, JSON-able dataclass. tr(D H D^T) of the result
    is never larger than before, for the damped H."""

    def refine(self, weight: Tensor, moment: Tensor, grid: Grid) -> Grid:
        """`grid` with better codes or scales for `weight` (N, K) and the damped second moment (K, K)."""
        raise NotImplementedError


@jsonable
class Nearest(Rounding):
    """Each element to its nearest value."""

    def round(self, weight: Tensor, moment: Tensor, *grids: Grid) -> float:
        for grid in grids:
            grid.codes = grid.nearest(weight)
        return 0.0


PRUNING_DAMPING = 0.01
"""Of H, where it says which elements matter."""

RETRIES = 6
"""Each retry damps ten times as much."""


def loss(error: Tensor, moment: Tensor) -> Tensor:
    """tr(D H D^T) by rows, (N,), for an error (N, K) and a second moment (K, K)."""
    return ((error @ moment) * error).sum(1)


def damped(moment: Tensor, damping: float, order: Tensor | None = None) -> Tensor:
    """H + damping * mean(diag H) * I in a new tensor, in this order; 1 on the diagonal for inputs always zero."""
    added = damping * moment.diagonal().float().mean()
    result = moment.float().clone() if order is None else moment.float()[order.unsqueeze(1), order]
    diagonal = result.diagonal()
    diagonal[diagonal == 0] = 1.0 if float(added) == 0 else 0.0
    diagonal += added
    return result


def factor(moment: Tensor, damping: float, order: Tensor | None = None) -> tuple[Tensor, float]:
    """(the lower Cholesky factor of the damped H, the damping used), with more damping where the factorization fails.
    The factor takes the place of the damped H, so that one matrix (K, K) is in memory beside H."""
    if not bool(torch.isfinite(torch.stack(moment.aminmax())).all()):
        raise ValueError("the second moment of the inputs is not finite: the calibration data gives NaN or infinities")
    for _ in range(RETRIES):
        result = damped(moment, damping, order).mT  # the same matrix by columns, as LAPACK wants it
        failed = torch.empty((), dtype=torch.int32, device=result.device)
        torch.linalg.cholesky_ex(result, out=(result, failed))
        if not int(failed):
            return result, damping
        damping = max(damping, 1e-4) * 10
    raise ValueError(f"the second moment of the inputs is not positive definite, even with damping {damping / 10:g}")


def saliency(weight: Tensor, moment: Tensor) -> Tensor:
    """w^2 / (H^-1)_jj, (N, K): how much the error grows if an element becomes zero and all others make up for it.
    Source: Optimal Brain Surgeon; SparseGPT, arXiv 2301.00774, section 3."""
    lower, _ = factor(moment, PRUNING_DAMPING)
    return weight.float().square() / torch.cholesky_inverse(lower, out=lower).diagonal()
