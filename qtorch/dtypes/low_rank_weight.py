"""LowRankWeight: a quantized matrix with a branch of low rank beside it, in 16 bits.

    w = Q + up down,    x w^T + b = (x Q^T + b) + (x down^T) up^T

Q has any scheme, and its product is that of a linear layer, by the same kernels; the branch sees the input before it is
quantized. So the branch takes what codes represent worst (SVDQuant, arXiv 2411.05007, equation 5).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.cpu.low_rank import HALVES, cpu_low_rank_mm
from ..kernels.registry import from_rows, to_rows
from ..primitives import is_compiling, jsonable
from ..primitives.layouts.base import Form, Forms, check_inner_tensors
from . import base, matrix_weight, views

aten = torch.ops.aten

BRANCH = ("up", "down")
"""The inner tensors of the branch."""

_SMALL, _LARGE = 2.0**-8, 2.0**15
"""The largest element of a factor that float16 keeps with enough bits for those that are smaller."""

_OVERSAMPLED = 16
_PASSES = 6


@jsonable
class LowRankScheme(matrix_weight.MatrixScheme):
    """Scheme of a matrix (N, K) beside a branch of rank `rank`."""

    rank: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shape) != 2 or type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"a branch of low rank is one of a matrix, got shape {self.shape}, rank {self.rank!r:.40}")


class LowRankWeight(matrix_weight.MatrixWeight):
    """A quantized matrix (N, K) with a branch beside it. Make one with `beside`.

    Attributes:
        up: (N, R), float16 or bfloat16, which stays when the logical dtype changes.
        down: (R, K).
    """

    scheme_type = LowRankScheme
    scheme: LowRankScheme
    up: Tensor
    down: Tensor

    @classmethod
    def beside(cls, matrix: base.QuantizedTensor, up: Tensor, down: Tensor) -> "LowRankWeight":
        """`matrix`, Q, with the branch ``up @ down``."""
        own = matrix.scheme
        scheme = LowRankScheme(own.spec, own.shape, own.dtype, up.shape[-1])
        return cls({**matrix.inner_tensors, "up": up, "down": down}, scheme)

    @classmethod
    def tensor_names(cls, scheme: Any) -> tuple[str, ...]:
        return (*super().tensor_names(scheme), *BRANCH)

    @classmethod
    def forms(cls, scheme: Any) -> Forms:
        (rows, columns), rank = scheme.shape, scheme.rank
        branch = {"up": (Form((rows, rank), HALVES),), "down": (Form((rank, columns), HALVES),)}
        return {**super().forms(scheme), **branch}

    @classmethod
    def of_matrix(cls, matrix: base.QuantizedTensor, scheme: Any) -> Any:
        raise TypeError("a LowRankWeight has more than a matrix: LowRankWeight.beside(matrix, up, down)")

    @classmethod
    def _of_parts(cls, matrix: base.QuantizedTensor, tensors: Mapping[str, Tensor], scheme: LowRankScheme) -> Any:
        """`beside`, for a matrix, and a branch among `tensors`, that come from a file."""
        branch = {name: tensors[name] for name in BRANCH if name in tensors}
        check_inner_tensors(branch, {name: cls.forms(scheme)[name] for name in BRANCH}, scheme)
        return cls({**matrix.inner_tensors, **branch}, scheme)

    def _with(self, matrix: base.QuantizedTensor) -> Any:
        return self.beside(matrix, self.up, self.down)

    def quantized_like(self, source: Tensor) -> Any:
        """`source`: another such weight, or floats, which get a branch of their own."""
        if isinstance(source, LowRankWeight):
            return self.beside(self.matrix.quantized_like(source.matrix), source.up, source.down)
        values = source.to(self.device, torch.float32)
        up, down = in_halves(low_rank_factors(values, self.scheme.rank), self.scheme.dtype)
        return self.beside(self.matrix.quantized_like(values - up.float() @ down.float()), up, down)

    def canonical(self) -> tuple[Tensor, dict[str, Tensor]]:
        codes, others = super().canonical()
        return codes, {**others, "up": self.up, "down": self.down}

    @classmethod
    def from_canonical(cls, codes: Tensor, others: dict[str, Tensor], scheme: Any) -> Any:
        of_matrix = {name: tensor for name, tensor in others.items() if name not in BRANCH}
        matrix = base.quantized_type(scheme.weight).from_canonical(codes, of_matrix, scheme.matrix)
        return cls._of_parts(matrix, others, replace(scheme, spec=matrix.scheme.spec))

    def _pickled(self) -> dict[str, Tensor]:
        return {**super()._pickled(), "up": self.up, "down": self.down}

    @classmethod
    def _from_pickled(cls, tensors: dict[str, Tensor], scheme: Any) -> Any:
        if type(scheme) is not LowRankScheme:
            raise ValueError(f"a {cls.__name__} has a LowRankScheme, got {scheme!r:.80}")
        of_matrix = {name: tensor for name, tensor in tensors.items() if name not in BRANCH}
        matrix = base.quantized_type(scheme.weight)._from_pickled(of_matrix, scheme.matrix)
        return cls._of_parts(matrix, tensors, scheme)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self.matrix.dequantize(torch.float32).addmm_(self.up.float(), self.down.float())
        return values.to(dtype or self.scheme.dtype)

    def moved(self, device: torch.device, move: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Any:
        return self.beside(self.matrix.moved(device, move, dtype), move(self.up), move(self.down))

    def cut(self, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
        matrix, part = self.new_matrix().cut(axis, start, stop, step), slice(start, stop, step)
        branch = (self.up[part], self.down) if axis % 2 == 0 else (self.up, self.down[:, part])
        return views.part_of(self, self.beside(matrix, *branch))

    def taken(self, axis: int, index: Tensor) -> Any:
        matrix = self.new_matrix().taken(axis, index)
        branch = (self.up[index], self.down) if axis % 2 == 0 else (self.up, self.down[:, index])
        return views.part_of(self, self.beside(matrix, *branch))

    def permuted(self, axes: Sequence[int]) -> Any:
        if [axis % 2 for axis in axes] == [0, 1]:
            return self.map_inner(lambda tensor: tensor)
        return self.beside(self.new_matrix().permuted(axes), self.down.t(), self.up.t())

    def reshaped(self, size: Sequence[int]) -> Any:
        if tuple(size) != self.scheme.shape:
            raise ValueError(f"a view of shape {tuple(size)} of {self!r} cuts its branch; dequantize() it first")
        return self.map_inner(lambda tensor: tensor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(rank {self.scheme.rank} in {self.up.dtype} beside {self.matrix!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten.constant_pad_nd.default and list(args[1]) == [0, 0]:
            return args[0].new_matrix()
        if func in (aten.cat.default, aten.stack.default):
            raise NotImplementedError(f"{func} of weights with branches of low rank; dequantize() them first")
        return super().__torch_dispatch__(func, types, args, kwargs)


def low_rank_factors(matrix: Tensor, rank: int, root: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best approximation of a matrix by a product of two thin ones, also for given inputs:

        left right = argmin |(A - left right) L|^2,    L L^T = E[x x^T] or the identity

    By the theorem of Eckart, Young and Mirsky it is the truncated singular value decomposition of A L, whose right
    factor is multiplied by L^-1. For inputs x it minimizes E|A x - left right x|^2 (QERA, arXiv 2410.06040, theorem 1).
    The singular vectors are found by subspace iteration (Halko, Martinsson, Tropp, arXiv 0909.4061, algorithm 4.4),
    which takes a few products with A in place of a whole decomposition.

    Args:
        matrix: A, (..., N, K) fp32.
        root: lower triangular L, (K, K).

    Returns:
        left (..., N, R) and right (..., R, K), of equal size; zeros beyond min(N, K).
    """
    root = None if root is None else root.to(matrix.device)
    weighted = matrix if root is None else matrix @ root
    most = min(weighted.shape[-2:])
    if rank + _OVERSAMPLED < most // 2:
        # The same start for the same matrix, on every device.
        generator = torch.Generator(device="cpu").manual_seed(0)
        shape = weighted.shape[-1], rank + _OVERSAMPLED
        start = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        basis = torch.linalg.qr(weighted @ start.to(weighted)).Q
        for _ in range(_PASSES):
            basis = torch.linalg.qr(weighted @ torch.linalg.qr(weighted.mT @ basis).Q).Q
        u, s, v = torch.linalg.svd(basis.mT @ weighted, full_matrices=False)
        u = basis @ u
    else:
        u, s, v = torch.linalg.svd(weighted, full_matrices=False)
    values = s[..., :rank].sqrt()
    left, right = u[..., :rank] * values.unsqueeze(-2), values.unsqueeze(-1) * v[..., :rank, :]
    if root is not None:
        right = torch.linalg.solve_triangular(root, right, upper=False, left=False)
    missing = max(0, rank - most)
    padded = torch.nn.functional.pad(left, (0, missing)), torch.nn.functional.pad(right, (0, 0, 0, missing))
    return padded[0].contiguous(), padded[1].contiguous()


def in_halves(factors: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factors of a branch of a weight in `dtype`: bfloat16 beside bfloat16, and where float16 would lose them."""
    fits = dtype != torch.bfloat16
    if fits and not factors[0].is_meta:
        fits = all(bool(_SMALL < factor.abs().max() < _LARGE) for factor in factors)
    up, down = (factor.to(torch.float16 if fits else torch.bfloat16) for factor in factors)
    return up, down


def matrix_beside(weight: LowRankWeight) -> Any:
    """The matrix beside the branch, also while a compiler traces, which then sees a view of the weight."""
    if is_compiling() and not weight.scheme.layout.traces_views:
        return torch.nn.functional.pad(weight, (0, 0))
    return weight.matrix


def add_branch(y: Tensor, input: Tensor, weight: LowRankWeight) -> Tensor:
    """y + (x down^T) up^T in the dtype of y, whose memory nobody else may read. For calls that record no gradient."""
    x, rows, on_cpu = to_rows(input), to_rows(y), y.device.type == "cpu"
    if on_cpu and not weight.scheme.layout.traces_views:
        rows = cpu_low_rank_mm(rows, x, weight.down, weight.up)
    else:
        down, up = weight.down.to(y.dtype), weight.up.to(y.dtype)
        rows = rows.addmm_(torch.nn.functional.linear(x, down), up.t())
    return from_rows(rows, input, None)
