"""Granularity: which elements share a scale, and the block arithmetic that follows from it.

A granularity defines a *block*: one size per axis, ``-1`` meaning the whole axis. The scale has as many axes as its
tensor and one element per block:

    scale.shape[i] = input.shape[i] / block[i]

For a weight (N, K), `PerRow` gives blocks (1, K) and a scale (N, 1), groups of 32 give (1, 32) and (N, K / 32).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from .jsonable import HashedOnce, jsonable, wrong_type
from .tracing import is_compiling

Block = tuple[int, ...]


class Granularity:
    """Base class of granularities. `pattern(ndim)` gives the block, with -1 for a whole axis."""

    def pattern(self, ndim: int) -> Block:
        raise NotImplementedError

    def block(self, shape: Sequence[int]) -> Block:
        """The block of a tensor of this shape, without -1; `ValueError` if it does not divide the tensor."""
        return resolve_block(self.pattern(len(shape)), shape)


@jsonable
class PerTensor(Granularity):
    """One scale for the whole tensor."""

    def pattern(self, ndim: int) -> Block:
        return (-1,) * ndim


@jsonable
class PerRow(Granularity):
    """One scale per row, which is the last axis: per output channel of a weight (N, K)."""

    def pattern(self, ndim: int) -> Block:
        return (1,) * (ndim - 1) + (-1,) * min(ndim, 1)


@jsonable
class PerToken(PerRow):
    """One scale per token: `PerRow` under the name that is usual for activations."""


@jsonable
class PerAxis(Granularity):
    """One scale per index along `axis`; ``PerAxis(0)`` is per output channel of a convolution."""

    axis: int = 0

    def pattern(self, ndim: int) -> Block:
        if not -ndim <= self.axis < ndim:
            raise ValueError(f"PerAxis({self.axis}) does not exist on a tensor of {ndim} dimensions")
        return tuple(1 if i == self.axis % ndim else -1 for i in range(ndim))


@jsonable
class PerGroup(Granularity):
    """One scale per `group_size` consecutive elements of the last axis; -1 is the whole row."""

    group_size: int

    def __post_init__(self) -> None:
        # An int at once: graphs of the compiler make granularities.
        if type(self.group_size) is not int and (wrong := wrong_type(PerGroup, vars(self))):
            raise TypeError(f"PerGroup.{wrong}")
        if self.group_size < 1 and self.group_size != -1:
            raise ValueError(f"group_size is {self.group_size}; it must be positive, or -1 for a whole row")

    def pattern(self, ndim: int) -> Block:
        return (1,) * (ndim - 1) + (self.group_size,) * min(ndim, 1)


@jsonable
class PerBlock(Granularity):
    """Explicit block sizes, right-aligned (missing leading axes are 1); -1 is a whole axis."""

    sizes: Block

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if any(size < 1 and size != -1 for size in self.sizes):
            raise ValueError(f"block sizes are {self.sizes}; each must be positive, or -1 for a whole axis")

    def pattern(self, ndim: int) -> Block:
        if len(self.sizes) > ndim:
            raise ValueError(f"PerBlock{self.sizes} needs {len(self.sizes)} axes, the tensor has {ndim}")
        return (1,) * (ndim - len(self.sizes)) + self.sizes


def granularity_of(pattern: Sequence[int]) -> Granularity:
    """The granularity that a block pattern stands for: `PerBlock` if no other one has this pattern."""
    pattern = tuple(pattern)
    ndim = len(pattern)
    for word in (PerTensor(), PerRow()):
        if word.pattern(ndim) == pattern:
            return word
    if pattern[-1] > 1 and all(size == 1 for size in pattern[:-1]):
        return PerGroup(pattern[-1])
    return PerBlock(pattern)


class IndivisibleError(ValueError):
    """The error for a tensor whose shape does not fit: blocks do not divide it, or it is smaller than one."""


def resolve_block(pattern: Sequence[int], shape: Sequence[int]) -> Block:
    """Replace -1 by the axis size; `IndivisibleError` if a block size does not divide its axis."""
    if len(pattern) != len(shape):
        raise ValueError(f"block_size {tuple(pattern)} has {len(pattern)} axes, the tensor has shape {tuple(shape)}")
    block = tuple(n if b == -1 else b for b, n in zip(pattern, shape, strict=True))
    for axis, (b, n) in enumerate(zip(block, shape, strict=True)):
        # An empty axis is its own block.
        if b != n and (b < 1 or n % b != 0):
            sizes = f"{n} % {b} along axis {axis}"
            raise IndivisibleError(f"block_size {block} does not divide shape {tuple(shape)}: {sizes}")
    return block


def scale_shape(shape: Sequence[int], block: Block) -> Block:
    """Shape of the scale of a tensor of this shape: one element per block."""
    return tuple(1 if b == n else n // b for b, n in zip(block, shape, strict=True))


def block_of(shape: Sequence[int], scale: Sequence[int]) -> Block:
    """The block that follows from the shape of the tensor and the shape of its scale."""
    return tuple(1 if s == n else n // s for n, s in zip(shape, scale, strict=True))


class InBlocks(HashedOnce):
    """Base of the specs: what follows from which elements share a scale."""

    granularity: Granularity

    def block_size(self, shape: Sequence[int]) -> Block:
        """Elements that share a scale in a tensor of this shape, per axis, which they divide (else `ValueError`)."""
        return self.granularity.block(shape)

    def scale_shape(self, shape: Sequence[int]) -> Block:
        """Shape of the scale of a tensor of this shape."""
        return scale_shape(shape, self.block_size(shape))

    def with_granularity(self, granularity: Granularity) -> Self:
        """The same numerics in other blocks."""
        return replace(self, granularity=granularity)  # type: ignore[type-var]


class BlockView:
    """View of a tensor of shape `shape` in blocks, in which `split(x)` and `split_scale(s)` broadcast. Axes with blocks
    of one element, or of the whole axis, are unchanged; an axis of n elements in blocks of b becomes two axes (n / b,
    b). `dims` are the axes of the split view that lie inside a block."""

    def __init__(self, shape: Sequence[int], block: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.block = resolve_block(block, shape)
        self.scale_shape = scale_shape(self.shape, self.block)
        split: list[int] = []
        split_scale: list[int] = []
        dims: list[int] = []
        for n, b in zip(self.shape, self.block, strict=True):
            if b == 1:
                split.append(n)
                split_scale.append(n)
            elif b == n:
                dims.append(len(split))
                split.append(n)
                split_scale.append(1)
            else:
                dims.append(len(split) + 1)
                split += [n // b, b]
                split_scale += [n // b, 1]
        self.dims = tuple(dims)
        self._split = split
        self._split_scale = split_scale

    def split(self, x: Tensor) -> Tensor:
        return x if len(self._split) == len(self.shape) else x.reshape(self._split)

    def split_scale(self, scale: Tensor) -> Tensor:
        """The scale, of any shape with one element per block (torchao leaves out reduced axes), in the split view."""
        count = math.prod(self.scale_shape)
        if scale.numel() != count:
            found = f"{count} scales of shape {self.scale_shape}, got shape {tuple(scale.shape)}"
            raise ValueError(f"a tensor of shape {self.shape} in blocks of {self.block} has {found}")
        return scale.reshape(self._split_scale)

    def as_rows(self, split: Tensor) -> Tensor:
        """The split view as (blocks in the order of the scale, elements of a block)."""
        outside = [axis for axis in range(split.dim()) if axis not in self.dims]
        count = math.prod(self.scale_shape)
        return split.permute(*outside, *self.dims).reshape(count, split.numel() // count if count else 0)

    def merge(self, x: Tensor) -> Tensor:
        compiled = is_compiling() and not torch.compiler.is_exporting()
        if not compiled or not x.is_cpu or x.dim() == len(self.shape):
            return x.reshape(self.shape)
        # Of a reshaped tensor Inductor reads the scale of element i at i // block. It fails to split such a loop beside
        # that of the transposed tensor in blocks (torch 2.13, `CppScheduling.try_loop_split`); with this view it is in
        # blocks.
        return x.contiguous().as_strided(self.shape, [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))])


def reshaped_blocks(shape: Sequence[int], block: Block, new_shape: Sequence[int]) -> list[int] | None:
    """The blocks of a tensor after a row-major reshape, -1 for a whole axis, or None if the reshape cuts across blocks.
    The elements that share a scale must fill whole axes of the new shape and an integer fraction of one more."""
    pattern: list[int] = []
    for old_axes, new_sizes in _matching_axes(shape, new_shape):
        run = _run_length([shape[a] for a in old_axes], [block[a] for a in old_axes])
        blocks = None if run is None else _run_blocks(new_sizes, run)
        if blocks is None:
            return None
        pattern += blocks
    return pattern


def _matching_axes(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Groups of consecutive axes of equal product: (indices into old, sizes in new)."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        olds: list[int] = []
        news: list[int] = []
        left = right = 1
        while i < len(old) and (not olds or left < right):
            left *= old[i]
            olds.append(i)
            i += 1
            while j < len(new) and right < left:
                right *= new[j]
                news.append(new[j])
                j += 1
        while j < len(new) and (not olds or new[j] == 1):
            news.append(new[j])
            j += 1
        groups.append((olds, news))
    return groups


def _run_length(sizes: Sequence[int], blocks: Sequence[int]) -> int | None:
    """Number of consecutive elements in row-major order that share a scale, or None if blocks are not contiguous."""
    run, open_ended = 1, True
    for n, b in zip(reversed(sizes), reversed(blocks), strict=True):
        if not open_ended and b != 1:
            return None
        run *= b
        open_ended = open_ended and b == n
    return run


def _run_blocks(sizes: Sequence[int], run: int) -> list[int] | None:
    """Block sizes whose blocks are runs of `run` elements, -1 for a whole axis, or None if there are none."""
    blocks: list[int] = []
    for n in reversed(sizes):
        if run % n == 0:
            blocks.append(-1 if n > 1 else 1)
            run //= n
        elif n % run == 0:
            blocks.append(run)
            run = 1
        else:
            return None
    return blocks[::-1] if run == 1 else None


class FlatBlocks(NamedTuple):
    """The elements of a tensor of any size and shape as a matrix, a row for each block. In row-major order they are
    `rows` runs of `length`. No block crosses the end of a run; the last one of each is completed with zeros."""

    rows: int
    length: int
    block: int

    @property
    def of_row(self) -> int:
        """Blocks of a run."""
        return -(-self.length // self.block)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.rows * self.of_row, self.block

    def split(self, x: Tensor) -> Tensor:
        """The matrix of a tensor."""
        padding = self.of_row * self.block - self.length
        return torch.nn.functional.pad(x.reshape(self.rows, self.length), (0, padding)).reshape(self.shape)

    def merge(self, matrix: Tensor) -> Tensor:
        """Inverse of `split`: the elements (rows, length)."""
        return matrix.reshape(self.rows, self.of_row * self.block)[:, : self.length]
