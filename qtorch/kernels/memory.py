"""Whether the memory that a tensor names is there."""

from __future__ import annotations

from torch import Tensor


def is_backed(tensor: Tensor) -> bool:
    """Whether its storage holds all of its elements: `untyped_storage().resize_` may have taken some away."""
    size = tensor.untyped_storage().nbytes()
    if size >= (tensor.storage_offset() + tensor.numel()) * tensor.itemsize and tensor.is_contiguous():
        return True
    if not tensor.numel():
        return True
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return size >= (tensor.storage_offset() + last + 1) * tensor.itemsize
