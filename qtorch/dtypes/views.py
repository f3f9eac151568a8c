"""Views and selections of a quantized tensor: exact, or an error that says what is allowed.

Codes, scales, and zero points or tables are sliced and reshaped together. The block size along an axis decides which
slices of the axis are allowed:

    one element              any slice
    the whole axis           any slice; the scale is unchanged
    b elements               slices that start and end at block boundaries, or lie inside one block

Packed codes stay packed if the view keeps the packed axis whole; otherwise they are unpacked and packed again. A view
that the layout cannot hold gets the plain layout.

`Viewed` has the four that all others are made of; a class that is held in another shape has its own. They cut and
permute the inner tensors. Below are the aten operators, and the torch functions that run in their place while
torch.export traces: the modes of the trace know the inner tensors of a parameter, and those that
`qtorch.export.portable` makes on the way, but no class that wraps them, so that an aten operator on a wrapper would end
in an error.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from ..primitives import Granularity, Scheme, granularity, is_compiling
from ..primitives.layouts import layout_for
from .dispatch import LEFT_OUT, implements_aten, implements_traced_view

aten = torch.ops.aten


class Viewed:
    """Mixin of `QuantizedTensor`: its views and selections."""

    def cut(self: Any, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
        """The slice start:stop:step along `axis`."""
        axis, length, block, spans = _along(self, axis)
        start, stop, step = slice(start, stop, step).indices(length)
        stop = max(start, stop)
        if block == 1 and not spans:
            of_scale = (start, stop, step)
        elif block == length:
            if (start, stop, step) != (0, length, 1):
                check_not_rotated(self, axis)
            of_scale = (0, 1, 1)
        elif step == 1 and start % block == 0 and stop % block == 0:
            of_scale = (start // block, stop // block, 1)
        elif start // block == (stop - 1) // block:
            check_not_rotated(self, axis)
            of_scale = (start // block, start // block + 1, 1)
        else:
            raise ValueError(
                f"the slice {start}:{stop}:{step} along axis {axis} cuts blocks of {block} ({self.scheme.weight}); "
                f"use multiples of {block}, or dequantize() first"
            )
        count = len(range(start, stop, step))
        of_codes = lambda codes: aten.slice.Tensor(codes, axis, start, stop, step)  # noqa: E731
        part = _selected(self, axis, count, of_codes, lambda scale: aten.slice.Tensor(scale, axis, *of_scale))
        return part_of(self, part)

    def taken(self: Any, axis: int, index: Tensor) -> Any:
        """The elements of these indices along `axis`."""
        axis, length, block, spans = _along(self, axis)
        if block not in (1, length):
            raise ValueError(
                f"index_select along axis {axis} cuts blocks of {block} ({self.scheme.weight}); dequantize() first"
            )
        if block == length:
            check_not_rotated(self, axis)
        take = lambda tensor: tensor.index_select(axis, index)  # noqa: E731
        return _selected(self, axis, index.shape[0], take, take if block == 1 and not spans else lambda scale: scale)

    def permuted(self: Any, axes: Sequence[int]) -> Any:
        """The tensor with its axes in another order."""
        axes = tuple(axis % len(axes) for axis in axes)
        scale, zero_point = self.scales()
        zero_point = None if zero_point is None else zero_point.permute((*axes, *range(len(axes), zero_point.dim())))
        pattern = _pattern(self)
        codes = _codes(self, lambda codes: codes.permute(axes), [self.scheme.shape[axis] for axis in axes])
        packed_axis = self.scheme.layout.packed_axis
        if packed_axis is not None:
            packed_axis = axes.index(packed_axis % len(axes)) - len(axes)
        return _rebuilt(self, codes, scale.permute(axes), zero_point, [pattern[axis] for axis in axes], packed_axis)

    def reshaped(self: Any, size: Sequence[int]) -> Any:
        """Row-major reshape: each run of elements that share a scale must fill whole axes of the new shape, then a
        whole fraction of one more."""
        scale, zero_point = self.scales()
        shape = self.scheme.shape
        codes = _reshaped_codes(self, size)
        if not codes.numel():
            # Without elements, blocks of any size are right.
            empty = (
                None if zero_point is None else zero_point.new_empty((*codes.shape, *zero_point.shape[len(shape) :]))
            )
            return _rebuilt(self, codes, scale.new_empty(codes.shape), empty, [1] * codes.dim())
        pattern = granularity.reshaped_blocks(shape, _block(self), codes.shape)
        if pattern is None:
            raise ValueError(
                f"a view of shape {tuple(codes.shape)} of a tensor of shape {shape} cuts across its blocks "
                f"({self.scheme.weight}); dequantize() first"
            )
        kept = _pattern(self)
        if tuple(codes.shape) == shape:
            pattern = kept
        elif shape and codes.shape and shape[-1] == codes.shape[-1] and pattern[-1] in (kept[-1], -1):
            pattern[-1] = kept[-1]
        wanted = [1 if b in (-1, n) else n // b for b, n in zip(pattern, codes.shape, strict=True)]
        zero_point = None if zero_point is None else zero_point.reshape((*wanted, *zero_point.shape[len(shape) :]))
        return _rebuilt(self, codes, scale.reshape(wanted), zero_point, pattern)


def check_not_rotated(tensor: Any, axis: int) -> None:
    """Raise `ValueError` if blocks are rotated along the axis, of which a part means nothing."""
    weight = tensor.scheme.weight
    if getattr(weight, "rotation", 0) and _pattern(tensor)[axis] != 1:
        raise ValueError(f"a view that cuts or joins rotated blocks ({weight}) along axis {axis}; dequantize() first")


def part_of(tensor: Any, part: Any) -> Any:
    """`part`, a slice of `tensor`, which notes whether some of its inner tensors are copies: scales that are quantized
    together with the rest, codes that had to be unpacked. Then `copy_` into it would miss the tensor, and is an
    error."""
    if not is_compiling() and not part.is_meta:
        own = tensor.inner_tensors
        shares = (
            name in own and inner.untyped_storage()._cdata == own[name].untyped_storage()._cdata
            for name, inner in part.inner_tensors.items()
        )
        if not all(shares):
            vars(part)["_copied_parts"] = True
    return part


def _pattern(tensor: Any) -> list[int]:
    return list(tensor.scheme.weight.granularity.pattern(len(tensor.scheme.shape)))


def _block(tensor: Any) -> tuple[int, ...]:
    block: tuple[int, ...] = tensor.scheme.weight.block_size(tensor.scheme.shape)
    return block


def _along(tensor: Any, axis: int) -> tuple[int, int, int, bool]:
    """The axis counted from the first, its length, that of a block, and whether the granularity calls a block whole."""
    axis %= len(tensor.scheme.shape)
    return axis, tensor.scheme.shape[axis], _block(tensor)[axis], _pattern(tensor)[axis] == -1


class _Packed(NamedTuple):
    """Codes that stay packed, and the shape that they have unpacked."""

    qdata: Tensor
    shape: tuple[int, ...]

    def numel(self) -> int:
        return math.prod(self.shape)

    def dim(self) -> int:
        return len(self.shape)


def _codes(x: Any, view: Callable[[Tensor], Tensor], shape: Sequence[int], axis: int | None = None) -> Tensor | _Packed:
    """A view of the codes, of this shape; they stay packed unless the view slices their packed axis (`axis`)."""
    layout = x.scheme.layout
    qdata = getattr(x, layout.tensors[0])
    if not layout.can_view(qdata) or (axis is not None and axis - len(x.scheme.shape) == layout.packed_axis):
        return view(x.plain()[0])
    return _Packed(view(qdata), tuple(shape))


def _selected(
    tensor: Any, axis: int, count: int, of_codes: Callable[[Tensor], Tensor], of_scale: Callable[[Tensor], Tensor]
) -> Any:
    """`count` elements along an axis, by what selects them from codes, and from scales and zero points."""
    shape, pattern = tensor.scheme.shape, _pattern(tensor)
    codes = _codes(tensor, of_codes, (*shape[:axis], count, *shape[axis + 1 :]), axis)
    scale, zero_point = (None if each is None else of_scale(each) for each in tensor.scales())
    assert scale is not None
    block = _block(tensor)[axis]
    if block > 1 and scale.shape[axis] == 1 and count != block:
        pattern[axis] = -1
    return _rebuilt(tensor, codes, scale, zero_point, pattern)


def _reshaped_codes(tensor: Any, size: Sequence[int]) -> Tensor | _Packed:
    layout, shape = tensor.scheme.layout, tensor.scheme.shape
    packed_axis, qdata = layout.packed_axis, getattr(tensor, layout.tensors[0])
    if layout.can_view(qdata) and -1 not in size and len(size) >= -packed_axis:
        kept = tuple(size[packed_axis:])
        if kept == shape[packed_axis:] and math.prod(size) == math.prod(shape):
            return _Packed(qdata.reshape(*size[:packed_axis], *qdata.shape[packed_axis:]), tuple(size))
    codes: Tensor = tensor.plain()[0].reshape(tuple(size))
    return codes


def _rebuilt(
    tensor: Any, codes: Tensor | _Packed, scale: Tensor, zero_point: Tensor | None, pattern: Sequence[int],
    packed_axis: int | None = None,
) -> Any:  # fmt: skip
    """`tensor` with other codes and scales, in blocks of `pattern`; `packed_axis` is the new one of its layout."""
    spec = tensor.scheme.spec
    if not _says(spec.weight.granularity, pattern):
        spec = replace(spec, weight=spec.weight.with_granularity(granularity.granularity_of(pattern)))
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


VIEWS: set[Any] = set()
"""The aten operators below."""


def _implements_view(*keys: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function gives the view, or the list of views, that these aten overloads, and these torch
    functions while torch.export traces, take of its first argument."""
    overloads = [key for key in keys if isinstance(key, torch._ops.OpOverload)]
    VIEWS.update(overloads)

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        @implements_aten(*overloads)
        def below_autograd(func: Any, args: Any, kwargs: Any) -> Any:
            found = view(*args, **kwargs)
            alike = all(type(each) is type(args[0]) for each in (found if isinstance(found, list) else [found]))
            return return_and_correct_aliasing(func, args, kwargs, found) if alike else found

        @implements_traced_view(*(key for key in keys if key not in overloads))
        def traced(*args: Any, **kwargs: Any) -> Any:
            found = view(*args, **kwargs)
            return tuple(found) if isinstance(found, list) else found

        return view

    return decorate


@_implements_view(aten.t.default, Tensor.t, torch.t, Tensor.T.__get__)  # type: ignore[attr-defined]
def _t(tensor: Any) -> Any:
    return tensor.permuted(range(len(tensor.scheme.shape))[::-1])


@_implements_view(aten.transpose.int, Tensor.transpose, torch.transpose)
def _transpose(tensor: Any, dim0: int, dim1: int) -> Any:
    axes = list(range(len(tensor.scheme.shape)))
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return tensor.permuted(axes)


@_implements_view(Tensor.mT.__get__)  # type: ignore[attr-defined]
def _mt(tensor: Any) -> Any:
    return _transpose(tensor, -2, -1)


@_implements_view(aten.permute.default)
def _permute(tensor: Any, dims: Sequence[int]) -> Any:
    return tensor.permuted(dims)


@_implements_view(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _reshape(tensor: Any, size: Sequence[int]) -> Any:
    return tensor.reshaped(size)


@_implements_view(aten.unsqueeze.default)
def _unsqueeze(tensor: Any, dim: int) -> Any:
    shape = list(tensor.scheme.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return tensor.reshaped(shape)


@_implements_view(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(tensor: Any, dim: int | list[int] | None = None) -> Any:
    shape = tensor.scheme.shape
    chosen = range(len(shape)) if dim is None else dim if isinstance(dim, list) else [dim]
    axes = [axis % len(shape) for axis in chosen]
    return tensor.reshaped([n for axis, n in enumerate(shape) if n != 1 or axis not in axes])


@_implements_view(aten.slice.Tensor)
def _slice(tensor: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return tensor.cut(dim, start, end, step)


@_implements_view(Tensor.narrow, torch.narrow)
def _narrow(tensor: Any, dim: int, start: int, length: int) -> Any:
    return tensor.cut(dim, start, start + length)


@_implements_view(aten.select.int, Tensor.select, torch.select)
def _select(tensor: Any, dim: int, index: int) -> Any:
    shape = tensor.scheme.shape
    dim %= len(shape)
    start = index + shape[dim] if index < 0 else index
    if not 0 <= start < shape[dim]:
        raise IndexError(f"index {start} is out of range for axis {dim} of shape {shape}")
    return tensor.cut(dim, start, start + 1).reshaped([n for axis, n in enumerate(shape) if axis != dim])


@_implements_view(aten.unbind.int, Tensor.unbind, torch.unbind)
def _unbind(tensor: Any, dim: int = 0) -> list[Any]:
    return [_select(tensor, dim, index) for index in range(tensor.scheme.shape[dim])]


@_implements_view(aten.split.Tensor, aten.split_with_sizes.default, Tensor.split, torch.split)
def _split(tensor: Any, split_size_or_sections: int | Sequence[int], dim: int = 0) -> list[Any]:
    sizes, length = split_size_or_sections, tensor.scheme.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    if sum(sizes) != length:
        raise ValueError(f"split: sizes {list(sizes)} do not add up to {length}")
    return [tensor.cut(dim, *ends) for ends in itertools.pairwise([0, *itertools.accumulate(sizes)])]


@_implements_view(Tensor.chunk, torch.chunk)
def _chunk(tensor: Any, chunks: int, dim: int = 0) -> list[Any]:
    return _split(tensor, -(-tensor.scheme.shape[dim] // chunks), dim)


@_implements_view(Tensor.__getitem__)
def _getitem(tensor: Any, index: Any) -> Any:
    """Integers and slices, one for each of the first axes."""
    axis = 0
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, int):
            tensor = _select(tensor, axis, part)
        elif isinstance(part, slice):
            tensor = tensor.cut(axis, part.start, part.stop, part.step or 1)
            axis += 1
        else:
            raise NotImplementedError(
                f"while torch.export traces, a quantized weight is indexed by integers and slices, got {part!r:.80}"
            )
    return tensor


@_implements_view(aten.index_select.default)
def _index_select(tensor: Any, dim: int, index: Tensor) -> Any:
    return tensor.taken(dim, index)


@_implements_view(aten.index.Tensor)
def _index(tensor: Any, indices: Sequence[Tensor | None]) -> Any:
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dim() != 1:
        raise NotImplementedError(
            f"indexing a quantized tensor takes one 1-d index tensor; dequantize() it; {LEFT_OUT}"
        )
    axis, index = given[0]
    # Indexing the positions resolves masks and negative indices, and checks them.
    return tensor.taken(axis, torch.arange(tensor.scheme.shape[axis], device=tensor.device)[index])
