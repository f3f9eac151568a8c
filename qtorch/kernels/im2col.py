"""Convolution as products of matrices: the windows of the input are gathered into rows (im2col).

    y[b, n, p] = sum_{c, t} x[b, c, stride p + dilation t - padding] w[n, c, t]

Each output position p of an image is one row, indexed by (kernel position t, input channel c): a scale per row is one
per window. The weight is a matrix (N, T * C): a scale per row is one per output channel, and groups run along the
channels. Channels come last because whole pixels are then copied, which is ten times as fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Size = int | Sequence[int]

WINDOW_BYTES = 4 << 20
"""Size of the windows that are gathered at a time."""


class Window(NamedTuple):
    """What a convolution reads for one output position, one number per axis of an image. `padding` is added at both
    ends."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def prepare_conv(
    ndim: int,
    x: Tensor,
    weight: Sequence[int],
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
    name: str,
) -> tuple[Tensor, Window]:
    """Check the arguments of a convolution, called `name` in errors.

    Args:
        x: (B, C, *sizes), `ndim` of them.
        weight: the shape (N, C / groups, *kernel).

    Returns:
        x, padded where ``padding='same'`` needs more at one end than at the other; the window.

    Raises:
        ValueError: the arguments do not fit each other.
    """
    if len(weight) != ndim + 2 or x.dim() != ndim + 2:
        raise ValueError(
            f"{name} takes an input of {ndim + 1} or {ndim + 2} axes and a weight of {ndim + 2}, got shapes "
            f"{tuple(x.shape)} and {tuple(weight)}"
        )
    n, channels, *kernel = weight
    if x.shape[1] != channels * groups or n % groups:
        raise ValueError(
            f"{name}: {x.shape[1]} input channels do not fit a weight of shape {tuple(weight)} in {groups} groups"
        )
    steps, spread = _per_axis(stride, ndim), _per_axis(dilation, ndim)
    reach = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
    if padding == "same":
        if any(step != 1 for step in steps):
            raise ValueError("padding='same' takes a stride of 1")
        if any(r % 2 for r in reach):  # one more after than before
            x = functional.pad(x, list(itertools.chain(*((0, r % 2) for r in reversed(reach)))))
        ends = tuple(r // 2 for r in reach)
    elif isinstance(padding, str) and padding != "valid":
        raise ValueError(f"padding is 'same', 'valid' or sizes, got {padding!r}")
    else:
        ends = (0,) * ndim if isinstance(padding, str) else _per_axis(padding, ndim)
    window = Window(tuple(kernel), steps, ends, spread, groups)
    if any(size + 2 * end <= r for size, end, r in zip(x.shape[2:], ends, reach, strict=True)):
        raise ValueError(f"the kernel {window.kernel}, dilated by {window.dilation}, exceeds the padded input")
    return x, window


def to_matrix(weight: Tensor) -> Tensor:
    """(N, C, *kernel) -> (N, T * C)."""
    return weight.movedim(1, -1).flatten(1)


def from_matrix(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """Inverse of `to_matrix`, for a weight of this shape: a view, channels last."""
    n, channels, *kernel = shape
    return matrix.reshape(n, *kernel, channels).movedim(-1, 1)


def multiply_windows(x: Tensor, window: Window, multiply: Callable[[Tensor, int], Tensor]) -> Tensor:
    """A convolution without bias.

    Args:
        x: (B, C, *sizes).
        multiply: (rows (M, T * C / groups), index of the group) -> (M, N / groups).

    Returns:
        (B, N, *positions); channels last where x is, else contiguous.

    In eager mode without gradients, `WINDOW_BYTES` of windows are gathered at a time. A compiler fuses gathering with
    what follows.
    """
    windows = _windows(x, window)
    pieces = [windows] if torch.compiler.is_compiling() or torch.is_grad_enabled() else _pieces(windows)
    y = _joined([_multiply_groups(piece, window, multiply) for piece in pieces], 0)
    y = y.reshape(*windows.shape[: 1 + len(window.kernel)], y.shape[1]).movedim(-1, 1)
    return y if is_channels_last(x) else y.contiguous()


def input_rows(x: Tensor, window: Window) -> Iterator[Tensor]:
    """The windows of x (B, C, *sizes) as rows (M, T * C / groups), some at a time; those of all groups."""
    for piece in _pieces(_windows(x, window)):
        for of_group in piece.chunk(window.groups, -1):
            yield of_group.reshape(-1, math.prod(window.kernel) * of_group.shape[-1])


def _windows(x: Tensor, window: Window) -> Tensor:
    """(B, *positions, *kernel, C): the window of each output position, a view of the padded input."""
    x = functional.pad(x.movedim(1, -1).contiguous(), [0, 0, *both_ends(window.padding)])
    for i, (k, step, d) in enumerate(zip(window.kernel, window.stride, window.dilation, strict=True)):
        x = x.unfold(1 + i, d * (k - 1) + 1, step)[..., ::d]
    ndim = len(window.kernel)
    return x.movedim(1 + ndim, -1)


def both_ends(padding: Sequence[int]) -> list[int]:
    """As `F.pad` takes it: (before, after) of the last axis first."""
    return list(itertools.chain(*((p, p) for p in reversed(padding))))


def _pieces(windows: Tensor) -> Iterator[Tensor]:
    """The windows in pieces of at most `WINDOW_BYTES`: whole images, or parts of one along its first axis; in order."""
    limit = WINDOW_BYTES // windows.element_size()
    of_image = max(1, math.prod(windows.shape[1:]))
    if of_image <= limit:
        yield from windows.split(limit // of_image)
        return
    step = max(1, limit // math.prod(windows.shape[2:]))
    for image in windows.split(1):
        yield from image.split(step, 1)


def _multiply_groups(windows: Tensor, window: Window, multiply: Callable[[Tensor, int], Tensor]) -> Tensor:
    """(M, N), M the number of windows."""
    rows = math.prod(windows.shape[: 1 + len(window.kernel)])
    width = math.prod(window.kernel) * windows.shape[-1] // window.groups
    of_groups = windows.chunk(window.groups, -1)
    return _joined([multiply(part.reshape(rows, width), group) for group, part in enumerate(of_groups)], 1)


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def is_channels_last(x: Tensor) -> bool:
    """Whether x (B, C, *sizes) is contiguous in channels-last order and in that order only."""
    if x.dim() not in (4, 5) or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def _per_axis(value: Size, ndim: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * ndim
    if len(value) not in (1, ndim):
        raise ValueError(f"stride, padding and dilation take 1 or {ndim} sizes, got {list(value)}")
    return tuple(value) * (ndim if len(value) == 1 else 1)
