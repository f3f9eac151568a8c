"""Views and selections of a quantized tensor: exact, or an error that says what is allowed.

Codes, scales, and zero points or tables are sliced and reshaped together. The block size along an axis decides which
slices of the axis are allowed:

    one element              any slice
    the whole axis           any slice; the scale is unchanged
    b elements               slices that start and end at block boundaries, or lie inside one block

Packed codes stay packed if the view keeps the packed axis whole; otherwise they are unpacked and packed again. A view
that the layout cannot hold gets the plain layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from ..primitives.granularity import Granularity, granularity_of, reshaped_blocks
from ..primitives.layouts.plain import layout_for
from ..primitives.spec import Scheme
from .base import QuantizedTensor
from .dispatch import implements_aten
from .ops import part_of

aten = torch.ops.aten


def _implements_view(*overloads: Any) -> Callable[[Callable[..., QuantizedTensor]], Callable[..., QuantizedTensor]]:
    """Decorator: the function gives the view that these aten overloads take of its first argument."""

    def decorate(view: Callable[..., QuantizedTensor]) -> Callable[..., QuantizedTensor]:
        @implements_aten(*overloads)
        def handler(func: Any, args: Any, kwargs: Any) -> Tensor:
            return return_and_correct_aliasing(func, args, kwargs, view(*args, **kwargs))

        return view

    return decorate


@_implements_view(aten.t.default)
def _t(tensor: QuantizedTensor) -> QuantizedTensor:
    return permute(tensor, range(len(tensor.scheme.shape))[::-1])


@_implements_view(aten.transpose.int)
def transpose(tensor: QuantizedTensor, first: int, second: int) -> QuantizedTensor:
    """The tensor with two axes exchanged."""
    axes = list(range(len(tensor.scheme.shape)))
    axes[first], axes[second] = axes[second], axes[first]
    return permute(tensor, axes)


@_implements_view(aten.unsqueeze.default)
def _unsqueeze(tensor: QuantizedTensor, axis: int) -> QuantizedTensor:
    shape = list(tensor.scheme.shape)
    shape.insert(axis % (len(shape) + 1), 1)
    return reshape(tensor, shape)


@_implements_view(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(tensor: QuantizedTensor, given: int | list[int] | None = None) -> QuantizedTensor:
    shape = tensor.scheme.shape
    chosen = range(len(shape)) if given is None else given if isinstance(given, list) else [given]
    axes = [axis % len(shape) for axis in chosen]
    return reshape(tensor, [n for axis, n in enumerate(shape) if n != 1 or axis not in axes])


@_implements_view(aten.slice.Tensor)
def _slice(tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    return part_of(tensor, cut(tensor, *args, **kwargs))


@_implements_view(aten.select.int)
def _select(tensor: QuantizedTensor, axis: int, index: int) -> QuantizedTensor:
    shape = tensor.scheme.shape
    axis %= len(shape)
    index = index + shape[axis] if index < 0 else index
    if not 0 <= index < shape[axis]:
        raise IndexError(f"index {index} is out of range for axis {axis} of shape {shape}")
    return reshape(cut(tensor, axis, index, index + 1, 1), [n for i, n in enumerate(shape) if i != axis])


@implements_aten(aten.split.Tensor, aten.split_with_sizes.default)
def split(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Parts along an axis, of one size or of several."""
    tensor, sizes, axis = (*args, kwargs.get("dim", 0))[:3]
    ends = part_ends(sizes, tensor.scheme.shape[axis])
    return [aten.slice.Tensor(tensor, axis, *pair) for pair in itertools.pairwise([0, *ends])]


def part_ends(sizes: int | Sequence[int], length: int) -> list[int]:
    """Where parts of these sizes, or of one size, end along an axis."""
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    if sum(sizes) != length:
        raise ValueError(f"split: sizes {list(sizes)} do not add up to {length}")
    return list(itertools.accumulate(sizes))


@implements_aten(aten.unbind.int)
def _unbind(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    tensor = args[0]
    axis = args[1] if len(args) > 1 else 0
    return [tensor.select(axis, index) for index in range(tensor.scheme.shape[axis])]


@implements_aten(aten.index_select.default)
def _index_select(func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor, axis, index = args
    axis %= len(tensor.scheme.shape)
    block, length = _block(tensor)[axis], tensor.scheme.shape[axis]
    if block not in (1, length):
        raise ValueError(
            f"index_select along axis {axis} cuts blocks of {block} ({tensor.scheme.weight}); dequantize() first"
        )
    scale, zero_point = tensor.scales()
    after = (*tensor.scheme.shape[:axis], index.shape[0], *tensor.scheme.shape[axis + 1 :])
    codes = _codes(tensor, lambda codes: codes.index_select(axis, index), after, axis)
    pattern = _pattern(tensor)
    if block == 1 and pattern[axis] != -1:
        scale = scale.index_select(axis, index)
        zero_point = None if zero_point is None else zero_point.index_select(axis, index)
    else:
        pattern[axis] = -1
    return _rebuilt(tensor, codes, scale, zero_point, pattern)


@implements_aten(aten.index.Tensor)
def _index(func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor, indices = args
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dim() != 1:
        raise NotImplementedError("indexing a quantized tensor takes one 1-d index tensor; dequantize() it first")
    axis, index = given[0]
    # Indexing the positions resolves masks and negative indices, and checks them.
    positions = torch.arange(tensor.scheme.shape[axis], device=tensor.device)
    return tensor.index_select(axis, positions[index])


@_implements_view(aten.permute.default)
def permute(tensor: QuantizedTensor, axes: Sequence[int]) -> QuantizedTensor:
    """The tensor with its axes in another order."""
    axes = tuple(axis % len(axes) for axis in axes)
    scale, zero_point = tensor.scales()
    zero_point = None if zero_point is None else zero_point.permute((*axes, *range(len(axes), zero_point.dim())))
    pattern = _pattern(tensor)
    codes = _codes(tensor, lambda codes: codes.permute(axes), [tensor.scheme.shape[axis] for axis in axes])
    packed_axis = tensor.scheme.layout.packed_axis
    if packed_axis is not None:
        packed_axis = axes.index(packed_axis % len(axes)) - len(axes)
    return _rebuilt(tensor, codes, scale.permute(axes), zero_point, [pattern[axis] for axis in axes], packed_axis)


def cut(
    tensor: QuantizedTensor, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> QuantizedTensor:
    """The slice start:stop:step along `axis`."""
    shape = tensor.scheme.shape
    axis %= len(shape)
    length = shape[axis]
    start, stop, step = slice(start, stop, step).indices(length)
    stop = max(start, stop)
    block = _block(tensor)[axis]
    pattern = _pattern(tensor)
    scale, zero_point = tensor.scales()
    after = (*shape[:axis], len(range(start, stop, step)), *shape[axis + 1 :])
    part = _codes(tensor, lambda codes: aten.slice.Tensor(codes, axis, start, stop, step), after, axis)
    if block == 1 and pattern[axis] != -1:
        of_scale = (start, stop, step)
    elif block == length:
        of_scale = (0, 1, 1)
    elif step == 1 and start % block == 0 and stop % block == 0:
        of_scale = (start // block, stop // block, 1)
    elif start // block == (stop - 1) // block:
        of_scale = (start // block, start // block + 1, 1)
    else:
        raise ValueError(
            f"the slice {start}:{stop}:{step} along axis {axis} cuts blocks of {block} ({tensor.scheme.weight}); "
            f"use multiples of {block}, or dequantize() first"
        )
    scale = aten.slice.Tensor(scale, axis, *of_scale)
    zero_point = None if zero_point is None else aten.slice.Tensor(zero_point, axis, *of_scale)
    if block > 1 and scale.shape[axis] == 1 and after[axis] != block:
        pattern[axis] = -1
    return _rebuilt(tensor, part, scale, zero_point, pattern)


@_implements_view(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def reshape(tensor: QuantizedTensor, size: Sequence[int]) -> QuantizedTensor:
    """Row-major reshape: each run of elements that share a scale must fill whole axes of the new shape, then a whole
    fraction of one more."""
    scale, zero_point = tensor.scales()
    shape = tensor.scheme.shape
    codes = _reshaped_codes(tensor, size)
    if not codes.numel():
        # Without elements, blocks of any size are right.
        empty = None if zero_point is None else zero_point.new_empty((*codes.shape, *zero_point.shape[len(shape) :]))
        return _rebuilt(tensor, codes, scale.new_empty(codes.shape), empty, [1] * codes.dim())
    pattern = reshaped_blocks(shape, _block(tensor), codes.shape)
    if pattern is None:
        raise ValueError(
            f"a view of shape {tuple(codes.shape)} of a tensor of shape {shape} cuts across its blocks "
            f"({tensor.scheme.weight}); dequantize() first"
        )
    kept = _pattern(tensor)
    if tuple(codes.shape) == shape:
        pattern = kept
    elif shape and codes.shape and shape[-1] == codes.shape[-1] and pattern[-1] in (kept[-1], -1):
        pattern[-1] = kept[-1]
    wanted = [1 if b in (-1, n) else n // b for b, n in zip(pattern, codes.shape, strict=True)]
    zero_point = None if zero_point is None else zero_point.reshape((*wanted, *zero_point.shape[len(shape) :]))
    return _rebuilt(tensor, codes, scale.reshape(wanted), zero_point, pattern)


def _pattern(tensor: QuantizedTensor) -> list[int]:
    return list(tensor.scheme.weight.granularity.pattern(len(tensor.scheme.shape)))


def _block(tensor: QuantizedTensor) -> tuple[int, ...]:
    return tensor.scheme.weight.block_size(tensor.scheme.shape)


class _Packed(NamedTuple):
    """Codes that stay packed, and the shape that they have unpacked."""

    qdata: Tensor
    shape: tuple[int, ...]

    def numel(self) -> int:
        return math.prod(self.shape)

    def dim(self) -> int:
        return len(self.shape)


def _codes(
    tensor: QuantizedTensor, view: Callable[[Tensor], Tensor], shape: Sequence[int], axis: int | None = None
) -> Tensor | _Packed:
    """A view of the codes, of this shape; they stay packed unless the view slices their packed axis (`axis`)."""
    layout = tensor.scheme.layout
    qdata = getattr(tensor, layout.tensors[0])
    if not layout.can_view(qdata) or (axis is not None and axis - len(tensor.scheme.shape) == layout.packed_axis):
        return view(tensor.plain()[0])
    return _Packed(view(qdata), tuple(shape))


def _reshaped_codes(tensor: QuantizedTensor, size: Sequence[int]) -> Tensor | _Packed:
    layout, shape = tensor.scheme.layout, tensor.scheme.shape
    packed_axis, qdata = layout.packed_axis, getattr(tensor, layout.tensors[0])
    if layout.can_view(qdata) and -1 not in size and len(size) >= -packed_axis:
        kept = tuple(size[packed_axis:])
        if kept == shape[packed_axis:] and math.prod(size) == math.prod(shape):
            return _Packed(qdata.reshape(*size[:packed_axis], *qdata.shape[packed_axis:]), tuple(size))
    return tensor.plain()[0].reshape(tuple(size))


def _rebuilt(
    tensor: QuantizedTensor,
    codes: Tensor | _Packed,
    scale: Tensor,
    zero_point: Tensor | None,
    pattern: Sequence[int],
    packed_axis: int | None = None,
) -> QuantizedTensor:
    """`tensor` with other codes and scales, in blocks of `pattern`; `packed_axis` is the new one of its layout."""
    spec = tensor.scheme.spec
    if not _says(spec.weight.granularity, pattern):
        spec = replace(spec, weight=spec.weight.with_granularity(granularity_of(pattern)))
    if packed_axis is not None:
        spec = replace(spec, layout=spec.layout.with_packed_axis(packed_axis))
    scheme = Scheme(spec, tuple(codes.shape), tensor.scheme.dtype)
    if isinstance(codes, _Packed):
        return tensor.with_packed(codes.qdata, scale, zero_point, scheme)
    spec = replace(spec, layout=layout_for(scheme))
    return tensor.with_plain((codes, scale, zero_point), spec)


def _says(word: Granularity, pattern: Sequence[int]) -> bool:
    try:
        return word.pattern(len(pattern)) == tuple(pattern)
    except ValueError:  # it needs more axes than there are
        return False
