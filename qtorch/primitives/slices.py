"""Slices: a function of a large tensor, computed on slices whose temporaries stay in the cache of the CPU.

Each operator of torch reads and writes whole tensors. For a weight of a hundred megabytes each of them waits for memory
and for the pages of a new result; for slices of a megabyte neither happens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .tracing import is_compiling, see_operators

SLICE_ELEMENTS = 1 << 18
"""Elements of a slice for each thread: a megabyte in fp32."""


def in_slices(function: Callable[..., Tensor], input: Tensor, *others: Tensor | None, axes: int = 1) -> Tensor:
    """``function(input, *others)``, on slices along the first `axes` axes.

    Args:
        function: a slice of its result depends on the same slice of its arguments only; the result has the sizes of
            `input` along these axes.
        others: their sizes along these axes are those of `input`, or 1 where all slices share them.
    """
    return _in_slices(function, input, others, axes) if needs_slices(input) else function(input, *others)


def needs_slices(input: Tensor) -> bool:
    """Whether slices are faster and change nothing else: neither a graph, a gradient, nor the order in memory."""
    return is_plain_on_cpu(input) and input.numel() > slice_elements()


def is_plain_on_cpu(input: Tensor) -> bool:
    """Whether only its numbers matter: contiguous, on CPU, of no subclass, and nothing traces or differentiates."""
    if is_compiling() or input.device.type != "cpu":
        return False
    if type(input) is not Tensor and type(input) is not torch.nn.Parameter:
        return False
    return not (input.requires_grad and torch.is_grad_enabled()) and input.is_contiguous() and not see_operators()


def slice_elements() -> int:
    """Elements of a slice."""
    return SLICE_ELEMENTS * torch.get_num_threads()


def _in_slices(function: Callable[..., Tensor], input: Tensor, others: tuple[Tensor | None, ...], axes: int) -> Tensor:
    axis = next((axis for axis in range(axes) if input.shape[axis] > 1), None)
    if axis is None or input.numel() <= slice_elements():
        return function(input, *others)
    length = input.shape[axis]
    step = max(1, slice_elements() * length // input.numel())
    result = None
    for start in range(0, length, step):
        size = min(step, length - start)
        parts = [o if o is None or o.shape[axis] == 1 else o.narrow(axis, start, size) for o in others]
        made = _in_slices(function, input.narrow(axis, start, size), tuple(parts), axes)
        if result is None:
            result = made.new_empty([*made.shape[:axis], length, *made.shape[axis + 1 :]])
        result.narrow(axis, start, size).copy_(made)
    assert result is not None
    return result
