"""TransposedWeight: a quantized weight that products contract along its last axis but one, (..., K, N).

Some modules store their weights as (inputs, outputs): `Conv1D` of transformers, the experts of GPT-OSS and Llama 4.
Codes, scales and groups run along K all the same: the weight is held as the matrices (..., N, K), those of a linear
layer, whatever its layout. Products transpose it back, which moves no data and gives the matrix itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from ..primitives.jsonable import jsonable
from .base import QuantizedTensor
from .dispatch import ATEN
from .matrix_weight import AS_A_WHOLE, MatrixScheme, MatrixWeight

aten = torch.ops.aten


@jsonable
@dataclass(frozen=True, eq=False)
class TransposedScheme(MatrixScheme):
    """Scheme of a weight (..., K, N) that is held as (..., N, K).

    Raises:
        ValueError: the shape has fewer than two dimensions.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shape) < 2:
            raise ValueError(f"a transposed weight has two or more dimensions, got shape {self.shape}")

    @property
    def codes_shape(self) -> tuple[int, ...]:
        return *self.shape[:-2], self.shape[-1], self.shape[-2]


class TransposedWeight(MatrixWeight):
    """A quantized weight (..., K, N) that is held as (..., N, K). Make one with `of` or `from_float`.

    Its views are exact, or an error, as for any quantized tensor: those that only select or cut give such a weight
    again, its transpose is `matrix`, and all others are views of the transposed matrix.
    """

    scheme_type = TransposedScheme
    scheme: TransposedScheme

    @staticmethod
    def to_matrix(weight: Tensor) -> Tensor:
        return weight.mT.contiguous()

    @staticmethod
    def from_matrix(matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix.mT

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain float tensor (..., K, N), in the logical dtype unless `dtype` is given."""
        return self.matrix.dequantize(dtype).mT.contiguous()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in AS_A_WHOLE or func not in ATEN:
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if isinstance(args[0], TransposedWeight):
            if _transposes(func, args):
                return args[0].new_matrix()
            if func in AXIS:
                return _cut(func, args, kwargs)
            if func is aten.index.Tensor and len(args[1]) <= len(args[0].scheme.shape) - 2:
                return _wrapped(func(args[0].matrix, args[1]))
        args, kwargs = tree_map_only(TransposedWeight, as_view, (args, kwargs))
        return func(*args, **kwargs)


def as_view(weight: TransposedWeight) -> Tensor:
    """The weight (..., K, N) as a view of its matrix, of the class that the matrix has."""
    return weight.matrix.transpose(-2, -1)


def contracted(weight: Tensor) -> Tensor:
    """The transpose of `weight`, a quantized tensor of two axes: what `F.linear` takes in place of ``x @ weight``."""
    if isinstance(weight, TransposedWeight) and not torch.compiler.is_compiling():
        return weight.matrix
    return weight.t()


AXIS = {
    aten.index_select.default: 1,
    aten.select.int: 1,
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.unbind.int: 1,
}
"""Operators that select or cut along one axis -> its position among the arguments; 0 if it is not given."""


def _transposes(func: Any, args: Any) -> bool:
    """Whether an operator exchanges the last two axes of its first argument and does nothing else."""
    ndim = len(args[0].scheme.shape)
    if func is aten.t.default:
        return True
    if func is aten.transpose.int:
        return {args[1] % ndim, args[2] % ndim} == {ndim - 2, ndim - 1}
    order = [*range(ndim - 2), ndim - 1, ndim - 2]
    return func is aten.permute.default and [axis % ndim for axis in args[1]] == order


def _cut(func: Any, args: Any, kwargs: Any) -> Any:
    """A part of a weight: of its matrix, along the axis that stands for that of the weight."""
    weight, position = args[0], AXIS[func]
    ndim = len(weight.scheme.shape)
    axis = (args[position] if len(args) > position else kwargs.get("dim", 0)) % ndim
    of_matrix = {ndim - 2: ndim - 1, ndim - 1: ndim - 2}.get(axis, axis)
    drops = func in (aten.select.int, aten.unbind.int)
    if drops and axis >= ndim - 2:
        return func(as_view(weight), *args[1:], **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name != "dim"}
    given = [*args[1:position], of_matrix, *args[position + 1 :]]
    result = tree_map_only(QuantizedTensor, _wrapped, func(weight.matrix, *given, **kwargs))
    if isinstance(result, list) or func is aten.index_select.default:
        return result
    return return_and_correct_aliasing(func, args, kwargs, result)


def _wrapped(matrix: Any) -> TransposedWeight:
    shape = matrix.scheme.shape
    return TransposedWeight.of(matrix, (*shape[:-2], shape[-1], shape[-2]))
