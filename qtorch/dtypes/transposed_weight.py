"""Quantized weights that are held as matrices of other axes: transposed, or with columns of zeros at the end.

    TransposedWeight   (..., K, N), held as (..., N, K + padding)
    PaddedWeight       (..., N, K), held as (..., N, K + padding)

Some modules store their weights as (inputs, outputs): `Conv1D` of transformers, the experts of GPT-OSS and Llama 4.
Codes, scales and groups run along K all the same: the weight is held as a linear layer holds it, whatever its layout.
Products transpose it back, which moves no data and gives the matrix itself.

Where groups do not divide K, the matrix has more columns, of zeros, up to the next group, and products pad their input
with as many zeros: exact, in every kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..primitives import is_compiling, jsonable
from . import base, dispatch, matrix_weight, views

aten = torch.ops.aten


@jsonable
class PaddedScheme(matrix_weight.MatrixScheme):
    """Scheme of a weight (..., N, K) that is held as (..., N, K + padding)."""

    padding: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shape) < 2 or type(self.padding) is not int or self.padding < 0:
            raise ValueError(
                f"a {type(self).__name__} has two or more dimensions and a padding of zero or more, got shape "
                f"{self.shape} and {self.padding!r:.40}"
            )

    @property
    def codes_shape(self) -> tuple[int, ...]:
        return *self.shape[:-1], self.shape[-1] + self.padding


@jsonable
@dataclass(frozen=True, eq=False)
class TransposedScheme(PaddedScheme):
    """Scheme of a weight (..., K, N) that is held as (..., N, K + padding)."""

    @property
    def codes_shape(self) -> tuple[int, ...]:
        return *self.shape[:-2], self.shape[-1], self.shape[-2] + self.padding


class PaddedWeight(matrix_weight.MatrixWeight):
    """A quantized weight (..., N, K) that is held as (..., N, K + padding). Make one with `of`.

    Its views are exact, or an error, as for any quantized tensor: those that only select or cut give such a weight
    again, its transpose is a `TransposedWeight`. Its last axis stays whole.
    """

    scheme_type = PaddedScheme
    scheme: PaddedScheme

    @classmethod
    def of(cls, matrix: base.QuantizedTensor, shape: Sequence[int]) -> Any:
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

    def transposed(self) -> base.QuantizedTensor:
        """The weight with its last two axes exchanged; it shares the inner tensors."""
        *rest, one, other = self.scheme.shape
        matrix, is_transposed = self.new_matrix(), isinstance(self, TransposedWeight)
        if is_transposed and not self.scheme.padding:
            return matrix
        kind: Any = PaddedWeight if is_transposed else TransposedWeight
        return kind.of(matrix, (*rest, other, one))

    def cut(self, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
        return self._like(self.new_matrix().cut(self._matrix_axis(axis), start, stop, step))

    def taken(self, axis: int, index: Tensor) -> Any:
        return self._like(self.new_matrix().taken(self._matrix_axis(axis), index))

    def permuted(self, axes: Sequence[int]) -> Any:
        ndim = len(self.scheme.shape)
        if [axis % ndim for axis in axes] == [*range(ndim - 2), ndim - 1, ndim - 2]:
            return self.transposed()
        return as_view(self).permuted(axes)

    def reshaped(self, size: Sequence[int]) -> Any:
        if len(size) > 1 and tuple(size[-2:]) == self.scheme.shape[-2:]:
            return self._like(self.new_matrix().reshaped([*size[:-2], *self.scheme.codes_shape[-2:]]))
        return as_view(self).reshaped(size)

    def _matrix_axis(self, axis: int) -> int:
        """The axis of the matrix that stands for this axis of the weight; an error if it is padded."""
        ndim = len(self.scheme.shape)
        axis %= ndim
        if axis >= ndim - 2 and isinstance(self, TransposedWeight):
            axis = 2 * ndim - 3 - axis
        if axis == ndim - 1:
            check_whole(self)
        return axis

    def _like(self, matrix: base.QuantizedTensor) -> Any:
        """`matrix`, a part of that of this weight, as such a weight."""
        *rest, rows, columns = matrix.scheme.shape
        columns -= self.scheme.padding
        shape = (*rest, columns, rows) if isinstance(self, TransposedWeight) else (*rest, rows, columns)
        return views.part_of(self, self.of(matrix, shape))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten.constant_pad_nd.default and list(args[1]) == [0, args[0].scheme.padding]:
            return args[0].new_matrix()
        if func in matrix_weight.AS_A_WHOLE or func in views.VIEWS or func not in dispatch.ATEN:
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if func in (aten.cat.default, aten.stack.default) and _joins_rows(func, args, kwargs):
            return args[0][0]._like(func([each.matrix for each in args[0]], *args[1:], **kwargs))
        args, kwargs = torch.utils._pytree.tree_map_only(PaddedWeight, as_view, (args, kwargs))
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


def check_whole(weight: PaddedWeight) -> None:
    """Raise `ValueError` if the weight is padded."""
    if weight.scheme.padding:
        raise ValueError(
            f"a view that cuts the contracted axis of {weight!r}, whose last group is padded; dequantize() it first"
        )


def as_view(weight: PaddedWeight) -> Any:
    """The weight as a view of its matrix, of the class that the matrix has; an error if it is padded."""
    check_whole(weight)
    return weight.matrix.transpose(-2, -1) if isinstance(weight, TransposedWeight) else weight.matrix


def contracted(weight: Tensor) -> Tensor:
    """The transpose of `weight`, a quantized tensor of two axes: what `F.linear` takes in place of ``x @ weight``."""
    if isinstance(weight, TransposedWeight) and not weight.scheme.padding and not is_compiling():
        return weight.matrix
    return weight.t()


def padded_matrix(weight: PaddedWeight) -> Tensor:
    """`matrix`, also while a compiler traces: the weight with zeros at the end of its rows."""
    if is_compiling() and not weight.scheme.layout.traces_views:
        return functional.pad(weight, (0, weight.scheme.padding))
    return weight.matrix


def _joins_rows(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether weights with the same padding, which stay whole along the padded axis, are joined."""
    first, ndim = args[0][0], args[0][0].dim()
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    alike = all(type(each) is PaddedWeight and each.scheme.padding == first.scheme.padding for each in args[0])
    return alike and (func is aten.stack.default or axis % ndim != ndim - 1)
