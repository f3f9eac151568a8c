"""Memory that compiled kernels read and write: addresses of tensors, and uninitialized tensors for results."""

from collections.abc import Callable, Sequence

import torch

# The allocator of compiled graphs: it takes half the time of one that goes through the dispatcher.
_allocate: Callable[..., torch.Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)


def address(tensor: torch.Tensor | None, dtype: torch.dtype | None = None) -> int:
    """Where the elements of a tensor lie, 0 for None: whatever compiled code reads or writes comes from here.

    Raises:
        ValueError: the tensor has another dtype than the code takes for granted (None: it is told that), does not lie
            in the memory of the CPU, or its elements are the negatives of what lies there.
    """
    if tensor is None:
        return 0
    pointer = tensor.data_ptr()
    if (
        not tensor.is_cpu
        or tensor.is_neg()
        or not (pointer or not tensor.numel())
        or not (dtype is None or tensor.dtype is dtype)
    ):
        raise ValueError(_refusal(tensor, dtype))
    return pointer


def _refusal(tensor: torch.Tensor, dtype: torch.dtype | None) -> str:
    kind, shape = type(tensor).__name__, tuple(tensor.shape)
    if not tensor.is_cpu:
        what = f"is on {tensor.device}, and compiled kernels read the memory of the CPU; move it with .to('cpu')"
    elif tensor.is_neg():
        what = "is a lazy negative of other memory; write it out with .resolve_neg()"
    elif dtype in (None, tensor.dtype):
        what = "has no memory: its storage was resized, or it only stands for another tensor"
    else:
        what = f"is given to a compiled kernel that takes {dtype}"
    return f"a {kind} of shape {shape} in {tensor.dtype} {what}"


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor."""
    if _allocate is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    strides: tuple[int, ...] = (1,)
    for size in shape[:0:-1]:
        strides = (strides[0] * max(size, 1), *strides)
    return _allocate(shape, strides, dtype)


def empty_at(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """A contiguous tensor and its address."""
    made = empty(shape, dtype)
    return made, made.data_ptr()


def empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor with these strides."""
    if _allocate is None:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    return _allocate(shape, strides, dtype)
