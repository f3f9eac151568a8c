"""BlockedTensor: a quantized tensor of any size and shape, in blocks of consecutive elements that share a scale.

Its codes are those of a matrix with a row for each block (`primitives.flat_blocks`), so it can have every spec of a
weight, affine or with a table. It is the state of an optimizer: it is copied, moved, saved, written and sharded as a
whole or between blocks, and multiplies nothing.

With `root` the codes stand for square roots of the values, none of which is negative: half of the exponents are enough,
and a positive value never becomes zero, since its code is at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..primitives import LinearSpec, granularity, jsonable, tracing
from . import base, dispatch, matrix_weight, ops

aten = torch.ops.aten


@jsonable
class BlockedScheme(matrix_weight.MatrixScheme):
    """Scheme of a `BlockedTensor`.

    Args:
        block: number of elements that share a scale.
        flat: blocks run over all elements; if False, none crosses the end of an index of the first axis, so that
            the tensor can be sharded along it anywhere.
        root: see the top of the file.
    """

    block: int = 256
    flat: bool = True
    root: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise ValueError(f"BlockedScheme: a block has at least one element, got {self.block}")

    @property
    def blocks(self) -> granularity.FlatBlocks:
        """How the elements are divided."""
        count = math.prod(self.shape)
        rows = 1 if self.flat or not self.shape else self.shape[0]
        return granularity.FlatBlocks(rows, count // rows if rows else 0, self.block)

    @property
    def codes_shape(self) -> tuple[int, ...]:
        return self.blocks.shape


class BlockedTensor(matrix_weight.MatrixWeight):
    """A quantized tensor of any size and shape in blocks. Make one with `quantized` or `of_matrix`."""

    scheme_type = BlockedScheme
    scheme: BlockedScheme

    @classmethod
    def quantized(cls, values: Tensor, scheme: BlockedScheme) -> BlockedTensor:
        """`values`, floats of the shape of the scheme, quantized."""
        if tuple(values.shape) != scheme.shape:
            raise ValueError(f"a BlockedTensor of shape {scheme.shape} takes floats of it, got {tuple(values.shape)}")
        values = values.detach().float()
        kind, spec = base.quantized_type(scheme.weight), scheme.spec
        if not scheme.root:
            return cls.of_matrix(kind.from_float(scheme.blocks.split(values), spec), scheme)
        roots = scheme.blocks.split(values.sqrt())
        matrix = kind.from_float(roots, spec)
        codes, scale, table = matrix.plain()
        # Codes ascend with the values, those of floating point as the bytes that they are.
        bytes_ = torch.maximum(codes.view(torch.uint8), (roots > 0).to(torch.uint8))
        return cls.of_matrix(matrix.with_plain((bytes_.view(codes.dtype), scale, table)), scheme)

    @classmethod
    def zeros(cls, scheme: BlockedScheme, device: torch.device | str) -> BlockedTensor:
        """A tensor of zeros."""
        return cls.quantized(torch.zeros(scheme.shape, device=device, dtype=torch.float32), scheme)

    @classmethod
    def from_float(cls, input: Tensor, spec: Any) -> BlockedTensor:
        """Quantize `input` in flat blocks of the default size."""
        linear = spec if isinstance(spec, LinearSpec) else LinearSpec(spec)
        return cls.quantized(input, BlockedScheme(linear, tuple(input.shape), input.dtype))

    def quantized_like(self, source: Tensor) -> BlockedTensor:
        if isinstance(source, BlockedTensor) and same_codes(source.scheme, self.scheme):
            return source
        values = source.dequantize(torch.float32) if isinstance(source, base.QuantizedTensor) else source
        return type(self).quantized(values.to(self.device), self.scheme)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self.scheme.blocks.merge(self.matrix.dequantize(torch.float32)).reshape(self.scheme.shape)
        values = values * values if self.scheme.root else values
        return values.to(dtype or self.scheme.dtype)

    def rows(self, start: int, stop: int) -> BlockedTensor:
        """Indices start:stop of the first axis, which share the memory of this tensor."""
        scheme, blocks = self.scheme, self.scheme.blocks
        size = math.prod(scheme.shape[1:])
        first, last = start * size, stop * size
        if not scheme.flat:
            first_block, last_block = start * blocks.of_row, stop * blocks.of_row
        elif first % scheme.block or (last % scheme.block and last != blocks.length):
            raise ValueError(
                f"{start}:{stop} of the first axis of shape {scheme.shape} cuts blocks of {scheme.block}: the states "
                "of this parameter can't be sharded there; give its group optim_bits=32"
            )
        else:
            first_block, last_block = first // scheme.block, -(-last // scheme.block)
        part = replace(scheme, shape=(stop - start, *scheme.shape[1:]))
        # Codes are packed along rows, and scales have as many.
        inner = {name: t[first_block:last_block] if t.dim() == 2 else t for name, t in self.inner_tensors.items()}
        return type(self)(inner, part)

    def cut(self, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> BlockedTensor:
        shape = self.scheme.shape
        axis %= len(shape)
        start, stop, step = slice(start, stop, step).indices(shape[axis])
        stop = max(start, stop)
        if (start, stop, step) == (0, shape[axis], 1):
            return self.map_inner(lambda inner: inner)
        if axis == 0 and step == 1:
            return self.rows(start, stop)
        raise ValueError(
            f"the slice {start}:{stop}:{step} along axis {axis} of shape {shape} cuts blocks of {self.scheme.block}: "
            "a BlockedTensor can be sharded along its first axis alone; dequantize() it first"
        )

    def reshaped(self, size: Sequence[int]) -> BlockedTensor:
        if tuple(size) != self.scheme.shape:
            raise ValueError(f"a BlockedTensor of shape {self.scheme.shape} has no view of shape {tuple(size)}")
        return self.map_inner(lambda inner: inner)

    @classmethod
    @tracing.starts_no_graph
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What has such a tensor behind another multiplies with it: that ends below, at operators without one.
        kwargs = kwargs or {}
        if args and isinstance(args[0], cls):
            return super().__torch_function__(func, types, args, kwargs)
        return dispatch.run_below(cls, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten.copy_.default:
            return _copy_(*args[:2])
        if func in matrix_weight.AS_A_WHOLE or func in _VIEWS_OF_ROWS or func not in dispatch.ATEN:
            return super().__torch_dispatch__(func, types, args, kwargs)
        raise NotImplementedError(
            f"{func} is not implemented for {cls.__name__}, the state of an optimizer; call .dequantize() first if you "
            "want a float tensor"
        )


_VIEWS_OF_ROWS = {aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.view.default}


def same_codes(one: BlockedScheme, other: BlockedScheme) -> bool:
    """Whether codes of one scheme stand for the same numbers in the other."""
    return replace(one, dtype=other.dtype) == other


def _copy_(target: Tensor, source: Tensor) -> Tensor:
    if not isinstance(target, BlockedTensor):
        raise ValueError(
            f"copy_ of a BlockedTensor into a {type(target).__name__} would lose its codes; dequantize() it first"
        )
    new = target.quantized_like(source)
    for name, inner in target.inner_tensors.items():
        inner.copy_(getattr(new, name))
    ops.count_write(target)
    return target
