"""Views of a frozen weight while torch.export traces, as torch functions rather than as aten operators.

The modes of the trace know the inner tensors of a parameter, and those that `qtorch.export.portable` makes on the way,
but no class that wraps them, so that an aten operator on a wrapper would end in an error. These functions cut and
permute the inner tensors, which are traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .base import QuantizedTensor
from .conv import ConvWeight
from .dispatch import implements_traced_view
from .transposed_weight import PaddedWeight, as_view, like, matrix_axis
from .views import cut, part_ends, permute, reshape, transpose


@implements_traced_view(Tensor.t, torch.t, Tensor.T.__get__)  # type: ignore[attr-defined]
def _t(tensor: QuantizedTensor) -> QuantizedTensor:
    return (
        tensor.transposed()
        if isinstance(tensor, PaddedWeight)
        else permute(tensor, range(len(tensor.scheme.shape))[::-1])
    )


@implements_traced_view(Tensor.mT.__get__)  # type: ignore[attr-defined]
def _mt(tensor: QuantizedTensor) -> QuantizedTensor:
    return _transpose(tensor, -2, -1)


@implements_traced_view(Tensor.transpose, torch.transpose)
def _transpose(tensor: QuantizedTensor, dim0: int, dim1: int) -> QuantizedTensor:
    if isinstance(tensor, PaddedWeight):
        ndim = len(tensor.scheme.shape)
        if {dim0 % ndim, dim1 % ndim} == {ndim - 2, ndim - 1}:
            return tensor.transposed()
        tensor = as_view(tensor)  # type: ignore[assignment]
    return transpose(tensor, dim0, dim1)


@implements_traced_view(Tensor.select, torch.select)
def _select(tensor: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    shape = tensor.scheme.shape
    dim %= len(shape)
    start = index % shape[dim]
    part = _slice(tensor, dim, start, start + 1)
    if isinstance(part, PaddedWeight):
        part = part.new_matrix()
    row = reshape(part, [n for axis, n in enumerate(part.scheme.shape) if axis != dim])
    return like(tensor, row) if isinstance(tensor, PaddedWeight) else row


@implements_traced_view(Tensor.narrow, torch.narrow)
def _narrow(tensor: QuantizedTensor, dim: int, start: int, length: int) -> QuantizedTensor:
    return _slice(tensor, dim, start, start + length)


@implements_traced_view(Tensor.unbind, torch.unbind)
def _unbind(tensor: QuantizedTensor, dim: int = 0) -> tuple[QuantizedTensor, ...]:
    return tuple(_select(tensor, dim, index) for index in range(tensor.scheme.shape[dim]))


@implements_traced_view(Tensor.split, torch.split)
def _split(
    tensor: QuantizedTensor, split_size_or_sections: int | Sequence[int], dim: int = 0
) -> tuple[QuantizedTensor, ...]:
    ends = part_ends(split_size_or_sections, tensor.scheme.shape[dim])
    return tuple(_slice(tensor, dim, *pair) for pair in pairwise([0, *ends]))


@implements_traced_view(Tensor.chunk, torch.chunk)
def _chunk(tensor: QuantizedTensor, chunks: int, dim: int = 0) -> tuple[QuantizedTensor, ...]:
    return _split(tensor, -(-tensor.scheme.shape[dim] // chunks), dim)


@implements_traced_view(Tensor.__getitem__)
def _getitem(tensor: QuantizedTensor, index: Any) -> QuantizedTensor:
    """Integers and slices, one for each of the first axes."""
    axis = 0
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, int):
            tensor = _select(tensor, axis, part)
        elif isinstance(part, slice):
            tensor = _slice(tensor, axis, part.start, part.stop, part.step or 1)
            axis += 1
        else:
            raise NotImplementedError(
                f"while torch.export traces, a quantized weight is indexed by integers and slices, got {part!r:.80}"
            )
    return tensor


def _slice(tensor: QuantizedTensor, axis: int, start: int | None, stop: int | None, step: int = 1) -> QuantizedTensor:
    if isinstance(tensor, PaddedWeight):
        of_matrix = matrix_axis(tensor, axis)
        if of_matrix == len(tensor.scheme.shape) - 1 and tensor.scheme.padding:
            as_view(tensor)  # the error
        return like(tensor, cut(tensor.new_matrix(), of_matrix, start, stop, step))
    if not isinstance(tensor, ConvWeight):
        return cut(tensor, axis, start, stop, step)
    if axis % len(tensor.scheme.shape) != 0:
        raise NotImplementedError("the weight of a convolution can be sliced along its first axis only")
    matrix = cut(tensor.matrix, 0, start, stop, step)
    return ConvWeight.of(matrix, (matrix.scheme.shape[0], *tensor.scheme.shape[1:]))
