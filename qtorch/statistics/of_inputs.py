"""Statistics of the inputs of a weight: their mean square, second moment, and the inputs themselves."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .base import Statistic


class Sum(Statistic):
    """Base class of statistics that are a mean over rows: `of` returns the sum over some rows, `mean` the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor | None = None
        self.closed = False

    def close(self) -> None:
        if self.total is not None and self.rows and not self.closed:
            self.total.div_(self.rows)  # the mean, without a second matrix (K, K)
        self.closed = True

    def of(self, rows: Tensor) -> Tensor:
        """The sum over these rows, which are in fp32."""
        raise NotImplementedError

    def update(self, rows: Tensor) -> None:
        self._add(self.of(rows.float()), rows.shape[0])

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{type(self).__name__}: is closed; collect a new statistic for more rows")

    def merge(self, other: Sum) -> None:
        other._check_open()
        if other.total is not None:
            self._add(other.total, other.rows)

    def _add(self, total: Tensor, rows: int) -> None:
        self._check_open()
        self.total = total if self.total is None else self.total.add_(total.to(self.total.device))
        self.rows += rows

    @property
    def mean(self) -> Tensor:
        """The mean over all rows seen.

        Raises:
            ValueError: no row was seen.
        """
        if self.total is None or not self.rows:
            raise ValueError(f"{type(self).__name__}: no row was seen")
        return self.total if self.closed else self.total / self.rows


class MeanSquare(Sum):
    """E[x_k^2], (K,): the diagonal of `SecondMoment`, the importance of each column of the weight."""

    def of(self, rows: Tensor) -> Tensor:
        return rows.square().sum(0)


class SecondMoment(Sum):
    """E[x x^T], (K, K): half the Hessian of |X (W - Q)^T|^2 / M with respect to each row of the weight.

    Source: GPTQ, arXiv 2210.17323, section 3.
    """

    def of(self, rows: Tensor) -> Tensor:
        return rows.t() @ rows


class Moments(SecondMoment):
    """`SecondMoment` of the inputs x~ of the model as quantized so far, and their products with those, x, in floats.

    Attributes:
        paired: the rows seen in both models.
    """

    paired: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.cross_total: Tensor | None = None
        self.residual_total: Tensor | None = None

    def close(self) -> None:
        if self.cross_total is not None and self.rows and not self.closed:
            self.cross_total.div_(self.rows)
        super().close()

    def update_pair(self, rows: Tensor, of_float: Tensor) -> None:
        """Add inputs x~ (M, K) of the quantized model and those of the float model, x, of the same tokens."""
        self.update(rows)
        self.cross_total = _sum(self.cross_total, of_float.float().t() @ rows.float())

    def update_residual(self, rows: Tensor, error: Tensor) -> None:
        """Add r - r~ (M, N), what the residual stream of the quantized model lacks, of the same tokens as x~ (M, K)."""
        self.residual_total = _sum(self.residual_total, error.float().t() @ rows.float())

    def merge(self, other: Sum) -> None:
        super().merge(other)
        if isinstance(other, Moments):
            self.cross_total = _sum(self.cross_total, other.cross_total)
            self.residual_total = _sum(self.residual_total, other.residual_total)

    @property
    def cross(self) -> Tensor | None:
        """E[x x~^T], (K, K); None if the float model was not run."""
        if self.cross_total is None or self.closed:
            return self.cross_total
        return self.cross_total / self.rows

    @property
    def residual(self) -> Tensor | None:
        """E[(r - r~) x~^T], (N, K); None if the output of the layer is not added to anything."""
        return None if self.residual_total is None else self.residual_total / self.rows


def _sum(total: Tensor | None, added: Tensor | None) -> Tensor | None:
    if total is None or added is None:
        return added if total is None else total
    return total.add_(added)


class Inputs(Statistic):
    """The rows themselves, in the order seen and in their own dtype: `value`, (M, K)."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Tensor] = []

    def update(self, rows: Tensor) -> None:
        self.parts.append(rows.clone())
        self.rows += rows.shape[0]

    def merge(self, other: Inputs) -> None:
        self.parts += other.parts
        self.rows += other.rows

    @property
    def value(self) -> Tensor:
        return torch.cat(self.parts)
