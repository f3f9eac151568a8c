"""Quantized weights that are held as matrices of other axes: transposed, or with columns of zeros at the end.

    TransposedWeight   (..., K, N), held as (..., N, K + padding)
    PaddedWeight       (..., N, K), held as (..., N, K + padding)

Some modules store their weights as (inputs, outputs): `Conv1D` of transformers, the experts of GPT-OSS and Llama 4.
Codes, scales and groups run along K all the same: the weight is held as a linear layer holds it, whatever its layout.
Products transpose it back, which moves no data and gives the matrix itself.

Where groups do not divide K, the matrix has more columns, of zeros, up to the next group, and products pad their input
with as many zeros: exact, in every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from ..primitives.jsonable import jsonable
from .base import QuantizedTensor
from .dispatch import ATEN
from .matrix_weight import AS_A_WHOLE, AXIS, DROPS, MatrixScheme, MatrixWeight, axis_of
from .ops import part_of

aten = torch.ops.aten


@jsonable
@dataclass(frozen=True, eq=False)
class PaddedScheme(MatrixScheme):
    """Scheme of a weight (..., N, K) that is held as (..., N, K + padding)."""

    padding: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # As part of the hash of the scheme: kernels are looked up by it.
        object.__setattr__(self, "_hash", hash((self.spec, self.shape, self.dtype, self.padding)))
        if len(self.shape) < 2 or type(self.padding) is not int or self.padding < 0:
            raise ValueError(
                f"a {type(self).__name__} has two or more dimensions and a padding of zero or more, got shape "
                f"{self.shape} and {self.padding!r:.40}"
            )

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.padding == other.padding  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return super().__hash__()

    @property
    def codes_shape(self) -> tuple[int, ...]:
        return *self.shape[:-1], self.shape[-1] + self.padding


@jsonable
@dataclass(frozen=True, eq=False)
class TransposedScheme(PaddedScheme):
    """Scheme of a weight (..., K, N) that is held as (..., N, K + padding)."""

    __hash__ = PaddedScheme.__hash__

    @property
    def codes_shape(self) -> tuple[int, ...]:
        return *self.shape[:-2], self.shape[-1], self.shape[-2] + self.padding


class PaddedWeight(MatrixWeight):
    """A quantized weight (..., N, K) that is held as (..., N, K + padding). Make one with `of`.

    Its views are exact, or an error, as for any quantized tensor: those that only select or cut give such a weight
    again, its transpose is a `TransposedWeight`. Its last axis stays whole.
    """

    scheme_type = PaddedScheme
    scheme: PaddedScheme

    @classmethod
    def of(cls, matrix: QuantizedTensor, shape: Sequence[int]) -> Any:
        """`matrix`, whose columns beyond those of the weight are zeros, as a weight of shape `shape`."""
        columns = shape[-2] if cls is TransposedWeight else shape[-1]
        padding = matrix.scheme.shape[-1] - columns
        scheme = cls.scheme_type(matrix.scheme.spec, tuple(shape), matrix.scheme.dtype, max(0, padding))
        return cls.of_matrix(matrix, scheme)

    @staticmethod
    def to_matrix(weight: Tensor) -> Tensor:
        return weight

    @staticmethod
    def from_matrix(matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix

    def quantized_like(self, source: Tensor) -> Any:
        if isinstance(source, type(self)):
            return self._with(self.matrix.quantized_like(source.matrix))
        return self._with(self.matrix.quantized_like(functional.pad(self.to_matrix(source), (0, self.scheme.padding))))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self.matrix.dequantize(dtype)
        values = values[..., : values.shape[-1] - self.scheme.padding]
        return self.from_matrix(values, self.scheme.shape).contiguous()

    def transposed(self) -> QuantizedTensor:
        """The weight with its last two axes exchanged; it shares the inner tensors."""
        *rest, one, other = self.scheme.shape
        matrix, is_transposed = self.new_matrix(), isinstance(self, TransposedWeight)
        if is_transposed and not self.scheme.padding:
            return matrix
        kind: Any = PaddedWeight if is_transposed else TransposedWeight
        transposed: QuantizedTensor = kind.of(matrix, (*rest, other, one))
        return transposed

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten.constant_pad_nd.default and list(args[1]) == [0, args[0].scheme.padding]:
            return args[0].new_matrix()
        if func in AS_A_WHOLE or func not in ATEN:
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        weight = args[0]
        if func in JOINS and _joins_rows(func, args, kwargs):
            return like(weight[0], func([each.matrix for each in weight], *args[1:], **kwargs))
        if isinstance(weight, PaddedWeight):
            if _transposes(func, args):
                return weight.transposed()
            outer = len(weight.scheme.shape) - 2
            if func in AXIS and (func not in DROPS or axis_of(func, args, kwargs) < outer):
                return _cut(func, args, kwargs)
            if func is aten.index.Tensor and len(args[1]) <= outer:
                return like(weight, func(weight.matrix, args[1]))
            if func in VIEWS and tuple(args[1][-2:]) == weight.scheme.shape[-2:]:
                matrix = func(weight.matrix, [*args[1][:-2], *weight.scheme.codes_shape[-2:]])
                return return_and_correct_aliasing(func, args, kwargs, like(weight, matrix))
        args, kwargs = tree_map_only(PaddedWeight, as_view, (args, kwargs))
        return func(*args, **kwargs)


class TransposedWeight(PaddedWeight):
    """A quantized weight (..., K, N) that is held as (..., N, K + padding). Make one with `of` or `from_float`.

    Views are as of a `PaddedWeight`. Without padding its transpose is `matrix`, and views that it cannot hold are views
    of the transposed matrix.
    """

    scheme_type = TransposedScheme
    scheme: TransposedScheme

    @staticmethod
    def to_matrix(weight: Tensor) -> Tensor:
        return weight.mT.contiguous()

    @staticmethod
    def from_matrix(matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix.mT


def as_view(weight: PaddedWeight) -> Tensor:
    """The weight as a view of its matrix, of the class that the matrix has; an error if it is padded."""
    if weight.scheme.padding:
        raise ValueError(
            f"a view that cuts the contracted axis of {weight!r}, whose last group is padded; dequantize() it first"
        )
    return weight.matrix.transpose(-2, -1) if isinstance(weight, TransposedWeight) else weight.matrix


def contracted(weight: Tensor) -> Tensor:
    """The transpose of `weight`, a quantized tensor of two axes: what `F.linear` takes in place of ``x @ weight``."""
    if isinstance(weight, TransposedWeight) and not weight.scheme.padding and not torch.compiler.is_compiling():
        return weight.matrix
    return weight.t()


def padded_matrix(weight: PaddedWeight) -> Tensor:
    """`matrix`, also while a compiler traces: the weight with zeros at the end of its rows."""
    if torch.compiler.is_compiling() and not weight.scheme.layout.traces_views:
        return functional.pad(weight, (0, weight.scheme.padding))
    return weight.matrix


JOINS = {aten.cat.default, aten.stack.default}

VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def _transposes(func: Any, args: Any) -> bool:
    """Whether an operator exchanges the last two axes of its first argument and does nothing else."""
    ndim = len(args[0].scheme.shape)
    if func is aten.t.default:
        return True
    if func is aten.transpose.int:
        return {args[1] % ndim, args[2] % ndim} == {ndim - 2, ndim - 1}
    order = [*range(ndim - 2), ndim - 1, ndim - 2]
    return func is aten.permute.default and [axis % ndim for axis in args[1]] == order


def _joins_rows(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether weights with the same padding, which stay whole along the padded axis, are joined."""
    first, ndim = args[0][0], args[0][0].dim()
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    alike = all(type(each) is PaddedWeight and each.scheme.padding == first.scheme.padding for each in args[0])
    return alike and (func is aten.stack.default or axis % ndim != ndim - 1)


def _cut(func: Any, args: Any, kwargs: Any) -> Any:
    """A part of a weight: of its matrix, along the axis that stands for that of the weight."""
    weight, position = args[0], AXIS[func]
    ndim = len(weight.scheme.shape)
    axis = matrix_axis(weight, axis_of(func, args, kwargs))
    if axis == ndim - 1 and weight.scheme.padding:
        return func(as_view(weight), *args[1:], **kwargs)
    rest = {name: value for name, value in kwargs.items() if name != "dim"}
    found = func(weight.matrix, *args[1:position], axis, *args[position + 1 :], **rest)
    result = tree_map_only(QuantizedTensor, lambda matrix: like(weight, matrix), found)
    if isinstance(result, list) or func is aten.index_select.default:
        return result
    return return_and_correct_aliasing(func, args, kwargs, result)


def matrix_axis(weight: PaddedWeight, axis: int) -> int:
    """The axis of the matrix that stands for this axis of the weight."""
    ndim = len(weight.scheme.shape)
    swapped = {ndim - 2: ndim - 1, ndim - 1: ndim - 2} if isinstance(weight, TransposedWeight) else {}
    return swapped.get(axis % ndim, axis % ndim)


def like(weight: PaddedWeight, matrix: Any) -> Any:
    """`matrix`, a part of that of `weight`, as such a weight."""
    *rest, rows, columns = matrix.scheme.shape
    columns -= weight.scheme.padding
    shape = (*rest, columns, rows) if isinstance(weight, TransposedWeight) else (*rest, rows, columns)
    return part_of(weight, type(weight).of(matrix, shape))
