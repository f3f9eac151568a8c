"""Dequantized copies of weights, kept within `qtorch.config.float_copy_bytes`.

They serve layers that are faster in floating point. A copy belongs to the tensor of codes that it was made from: it is
freed with that tensor, and not used after the codes, scale or zero point were written to. The weight holds no reference
to its copy, so it is never saved, moved or copied with the weight.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import config

_Key = tuple[int, torch.dtype]


class _Entry(NamedTuple):
    codes: weakref.ref[Tensor]
    versions: tuple[int, ...]
    copy: Tensor


_entries: dict[_Key, _Entry] = {}
_lock = threading.RLock()  # the callback of a weak reference may run at any time, in any thread


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def wanted() -> bool:
    """Whether the limit allows copies; existing ones are dropped if it is 0 now."""
    if config.float_copy_bytes <= 0 and _entries:
        clear()
    return config.float_copy_bytes > 0


def float_copy(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype, make: Callable[[], Tensor], size: int
) -> Tensor | None:
    """The copy in `dtype` of the weight with these tensors, made by `make` at the first call; None if its `size` in
    bytes would exceed the limit."""
    tensors = (codes, scale) if zero_point is None else (codes, scale, zero_point)
    if any(tensor.is_inference() for tensor in tensors):
        return None  # their versions do not count writes
    versions = tuple(tensor._version for tensor in tensors)
    key = (id(codes), dtype)
    found = _entries.get(key)
    if found is not None and found.codes() is codes and found.versions == versions:
        return found.copy
    with _lock:
        _entries.pop(key, None)
        if used() + size > config.float_copy_bytes:
            return None
        copy = make()
        _entries[key] = _Entry(weakref.ref(codes, lambda _: _drop(key)), versions, copy)
        return copy


def used() -> int:
    """Bytes of all copies."""
    return sum(entry.copy.nbytes for entry in list(_entries.values()))


def clear() -> None:
    """Drop all copies."""
    with _lock:
        _entries.clear()


def _drop(key: _Key) -> None:
    with _lock:
        _entries.pop(key, None)
