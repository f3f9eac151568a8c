"""Joining matrices into one tensor with more axes, and cutting it into matrices again, without a change of any number.

transformers keeps the experts of a layer in one parameter of shape (experts, rows, columns), whose rows may be those of
two projections one after the other; checkpoints keep one matrix per expert and projection.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..primitives import Granularity, PerBlock, PerGroup, PerRow, PerTensor
from . import dispatch, ops, views
from .base import QuantizedTensor

_OF_ROWS = (PerRow, PerGroup)
"""Granularities whose blocks lie in one row, so that they say the same of a matrix and of a stack of matrices."""

_OF_SCALES = ("scale_scale", "scale_mean")
_ACTIVATION = ("act_scale", "act_zero_point")
_SHARED = (*_ACTIVATION, *_OF_SCALES)
"""Parts that all matrices of a joined tensor share."""


def join(matrices: Sequence[Sequence[Tensor]]) -> Tensor:
    """Stack over the outer sequence of the concatenation, by rows, over the inner one.

    Args:
        matrices: E sequences of P matrices (rows, columns) each, all plain or all quantized alike.

    Returns:
        A tensor of shape (E, sum of the rows, columns), quantized if the matrices are.
    """
    flat: list[Any] = [matrix for parts in matrices for matrix in parts]
    first = flat[0]
    kinds = {isinstance(matrix, QuantizedTensor) for matrix in flat}
    if len(kinds) > 1:
        raise ValueError("some of the matrices are quantized and some are not")
    if kinds == {False}:
        return torch.stack([_cat(parts) for parts in matrices])
    for matrix in flat:
        if (matrix.scheme.spec, matrix.scheme.dtype) != (first.scheme.spec, first.scheme.dtype):
            raise ValueError(f"the matrices are not quantized alike: {first.scheme.spec} and {matrix.scheme.spec}")
    return _join_quantized(matrices)


def _join_quantized(matrices: Any) -> QuantizedTensor:
    first: QuantizedTensor = matrices[0][0]
    weight = first.scheme.weight
    canonical = [[matrix.canonical() for matrix in parts] for parts in matrices]
    flat = [others for parts in canonical for _, others in parts]
    if any(not torch.equal(others[name], flat[0][name]) for name in {*_ACTIVATION} & {*flat[0]} for others in flat):
        raise ValueError("the static activations of the matrices have different scales")
    if weight.scale_spec is not None and not _share_scales(weight.scale_spec.granularity, flat):
        canonical = [[_with_dense_scale(matrix) for matrix in parts] for parts in matrices]
        flat = [others for parts in canonical for _, others in parts]
        weight = replace(weight, scale_spec=None)
    weight = joined_weight(weight, [matrix.scheme.shape for parts in matrices for matrix in parts])
    codes = torch.stack([_cat([codes for codes, _ in parts]) for parts in canonical])
    joined = {
        name: value if _is_shared(name, weight) else torch.stack([_cat([o[name] for _, o in row]) for row in canonical])
        for name, value in flat[0].items()
    }
    shape = (*codes.shape[:2], first.scheme.shape[-1])  # without the columns of a padded one
    scheme = replace(first.scheme, spec=replace(first.scheme.spec, weight=weight), shape=shape)
    return type(first).from_canonical(codes, joined, scheme)


def joined_weight(weight: Any, shapes: Sequence[Sequence[int]]) -> Any:
    """The spec of `join` of matrices of these shapes that are quantized by `weight`."""
    if isinstance(weight.granularity, _OF_ROWS):
        return weight
    blocks = {weight.block_size(shape) for shape in shapes}
    if len(blocks) > 1:
        raise ValueError(f"the blocks of the matrices differ: {sorted(blocks)}")
    return replace(weight, granularity=PerBlock((1, *blocks.pop())))


def shares_scales(weight: Any) -> bool:
    """Whether matrices quantized one by one by this spec, and then joined, differ from the joined ones quantized."""
    return not isinstance(weight.granularity, _OF_ROWS) or weight.scale_spec is not None


def cut(tensor: Tensor, parts: int) -> list[list[Tensor]]:
    """Inverse of `join`: for each index of the first axis, `parts` matrices with the same number of rows."""
    if tensor.dim() != 3 or tensor.shape[1] % parts:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no {parts} matrices for each of its first axis")
    if not isinstance(tensor, QuantizedTensor):
        return [list(matrix.chunk(parts)) for matrix in tensor]
    weight = tensor.scheme.weight
    codes, others = tensor.canonical()
    if weight.scale_spec is not None and not isinstance(weight.scale_spec.granularity, PerTensor):
        codes, others = _with_dense_scale(tensor)
        weight = replace(weight, scale_spec=None)
    count, all_rows, columns = codes.shape
    rows, block = all_rows // parts, weight.block_size(codes.shape)
    if block[1] != all_rows and rows % block[1]:
        raise ValueError(f"its {parts} matrices of {rows} rows cut through the blocks {block} that share a scale")
    if not isinstance(weight.granularity, _OF_ROWS):
        of_matrix = min(block[1], rows), block[2]
        granularity = PerTensor() if of_matrix == (rows, columns) else PerBlock(of_matrix)
        weight = replace(weight, granularity=granularity)
    shape = (rows, tensor.scheme.shape[-1])
    scheme = replace(tensor.scheme, spec=replace(tensor.scheme.spec, weight=weight), shape=shape)

    def matrix(index: int, part: int) -> Tensor:
        found = {
            name: value if _is_shared(name, weight) else _piece(value, index, part, parts)
            for name, value in others.items()
        }
        return type(tensor).from_canonical(codes[index].chunk(parts)[part].contiguous(), found, scheme)

    return [[matrix(index, part) for part in range(parts)] for index in range(count)]


def _piece(value: Tensor, index: int, part: int, parts: int) -> Tensor:
    """The piece of a tensor with one element per block; one that spans an axis belongs to all of its pieces."""
    matrix = value[index if value.shape[0] > 1 else 0]
    return matrix.chunk(parts)[part] if matrix.shape[0] > 1 else matrix


def _is_shared(name: str, weight: Any) -> bool:
    return name in _SHARED or (name == "table" and weight.table is not None)


def _share_scales(granularity: Granularity, parts: Sequence[dict[str, Tensor]]) -> bool:
    """Whether the scales of all matrices are quantized with one common scale, so that they can be joined."""
    first = parts[0]
    return isinstance(granularity, PerTensor) and all(
        torch.equal(others[name], first[name]) for others in parts for name in _OF_SCALES if name in first
    )


def _with_dense_scale(matrix: QuantizedTensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`canonical` with the scale as the numbers that its codes stand for."""
    codes, others = matrix.canonical()
    dense = {name: value for name, value in others.items() if name not in _OF_SCALES}
    return codes, {**dense, "scale": matrix.scales()[0]}


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


aten = torch.ops.aten


@dispatch.implements_aten(aten.cat.default)
def _torch_cat(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Tensors of one spec. Along an axis that one scale spans, that scale must be equal in all: parts of one tensor."""
    tensors = args[0]
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = next(tensor for tensor in tensors if isinstance(tensor, QuantizedTensor))
    for other in tensors:
        if type(other) is not type(first) or other.scheme.spec != first.scheme.spec:
            what = repr(other) if isinstance(other, QuantizedTensor) else f"a tensor of {other.dtype}"
            raise ValueError(f"cat joins tensors quantized alike, got {first!r} and {what}; {dispatch.LEFT_OUT}")
        if other.scheme.dtype != first.scheme.dtype:
            raise ValueError(f"cat joins tensors of one dtype, got {first.scheme.dtype} and {other.scheme.dtype}")
    of_activation = [name for name in _ACTIVATION if getattr(first, name, None) is not None]
    if not all(torch.equal(getattr(t, name), getattr(first, name)) for t in tensors for name in of_activation):
        raise ValueError("cat cannot join weights with static activation scales, which differ; dequantize() them first")
    if not -len(first.scheme.shape) <= axis < len(first.scheme.shape):
        raise ValueError(f"cat along axis {axis} of tensors of shape {tuple(first.scheme.shape)}")
    axis %= len(first.scheme.shape)
    codes = torch.cat([tensor.plain()[0] for tensor in tensors], axis)
    if first.scheme.weight.granularity.pattern(len(first.scheme.shape))[axis] == -1:
        views.check_not_rotated(first, axis)
        if all(ops.same_scales(first, other) for other in tensors):
            return first.with_plain((codes, *first.scales()))
        raise ValueError(f"cat along axis {axis}: one scale spans the axis ({first.scheme.weight}); dequantize() first")
    scales, zero_points = zip(*[tensor.scales() for tensor in tensors], strict=True)
    zero_point = None if zero_points[0] is None else torch.cat(zero_points, axis)
    return first.with_plain((codes, torch.cat(scales, axis), zero_point))


@dispatch.implements_aten(aten.stack.default)
def _stack(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Matrices of one spec along a new first axis."""
    tensors, axis = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if axis != 0 or any(tensor.dim() != 2 for tensor in tensors):
        raise ValueError(f"stack joins quantized matrices along axis 0, got {tensors[0]!r} and axis {axis}")
    return join([[tensor] for tensor in tensors])
