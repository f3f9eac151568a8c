"""Dequantized copies of weights, kept within `qtorch.config.float_copy_bytes`, and products on them.

They serve layers that are faster in floating point; without compiled kernels any number of rows is, except with int8
codes of a scale per row, which `fixed_point_mm` multiplies. A copy goes with the tensor of codes, and when scales, zero
points or tables are written to or replaced. The weight has no reference to it, so it is never saved or moved.
"""

import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...primitives import ZeroPointDomain, dequantize_affine, dequantize_codebook, granularity, qdtype
from ...primitives.layouts.packed import unpack_bits, unpack_codes
from ..config import config
from ..custom_ops import Name, implement, note, portable
from ..linear.codebooks import lut_weight_mm
from ..linear.weight_only import packed_weight_mm
from ..ops.weight_only_mm import CodeNumerics, weight_only_mm


class _Entry(NamedTuple):
    sources: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    copy: Tensor | None  # if sources do not last, such as scales that are made for each call


_Key = tuple[int, torch.dtype]
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
    sources: Iterable[Tensor | None], dtype: torch.dtype, make: Callable[[], Tensor], size: int
) -> Tensor | None:
    """The copy in `dtype` of the weight with these tensors, the first of which are codes, made by `make` at the first
    call; None if its `size` in bytes would exceed the limit."""
    tensors = tuple(tensor for tensor in sources if tensor is not None)
    codes, *others = tensors
    if any(tensor.is_inference() for tensor in tensors):
        return None  # their versions do not count writes
    versions = tuple(tensor._version for tensor in tensors)
    key = (id(codes), dtype)
    found = _entries.get(key)
    before = [source() for source in found.sources] if found else []
    if found and found.copy is not None and found.versions == versions and all(map(operator.is_, before, tensors)):
        return found.copy
    with _lock:
        _entries.pop(key, None)
        lasts = all(source is not None for source in before)
        if lasts and used() + size > config.float_copy_bytes:
            return None
        copy = make() if lasts else None
        _entries[key] = _Entry((weakref.ref(codes, lambda _: _drop(key)), *map(weakref.ref, others)), versions, copy)
        return copy


def used() -> int:
    """Bytes of all copies."""
    return sum(entry.copy.nbytes for entry in list(_entries.values()) if entry.copy is not None)


def clear() -> None:
    """Drop all copies."""
    with _lock:
        _entries.clear()


def _drop(key: _Key) -> None:
    with _lock:
        _entries.pop(key, None)


@implement("packed_weight_mm", "cpu")
def packed_weight_mm_cpu(
    x: Tensor, qdata: Tensor, n: int, axis: int,
    scale: Tensor, zero_point: Tensor | None, dtype: Name, low: float, high: float, domain: Name,
) -> Tensor:  # fmt: skip
    """See `packed_weight_mm`."""
    # A transposed weight is a view, new for each product: its copy would be used once.
    if wanted() and axis == -1:
        numerics = CodeNumerics(scale, zero_point, qdtype(dtype), low, high, ZeroPointDomain[domain])
        read = lambda: unpack_codes(qdata, numerics.kind, x.shape[1])  # noqa: E731
        if (y := _on_copy("packed_weight_mm", x, qdata, read, n, numerics)) is not None:
            return y
    return portable(packed_weight_mm)(x, qdata, n, axis, scale, zero_point, dtype, low, high, domain)


@implement("weight_only_mm", "cpu")
def weight_only_mm_cpu(
    x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None,
    dtype: Name, low: float, high: float, domain: Name,
) -> Tensor:  # fmt: skip
    """See `weight_only_mm`."""
    n = len(codes)
    if wanted() and (dtype != "int8" or zero_point is not None or scale.shape != (n, 1)):
        numerics = CodeNumerics(scale, zero_point, qdtype(dtype), low, high, ZeroPointDomain[domain])
        if (y := _on_copy("weight_only_mm", x, codes, lambda: codes, n, numerics)) is not None:
            return y
    return portable(weight_only_mm)(x, codes, scale, zero_point, dtype, low, high, domain)


@implement("lut_weight_mm", "cpu")
def lut_weight_mm_cpu(x: Tensor, qdata: Tensor, scale: Tensor, table: Tensor, bits: int, axis: int, n: int) -> Tensor:
    """See `lut_weight_mm`."""
    if wanted() and axis == 1:
        read = lambda: unpack_bits(qdata, bits, x.shape[1])  # noqa: E731
        if (y := _on_copy("lut_weight_mm", x, qdata, read, n, (scale, table), dequantize_codebook)) is not None:
            return y
    return portable(lut_weight_mm)(x, qdata, scale, table, bits, axis, n)


def _on_copy(
    name: str, x: Tensor, codes: Tensor, read: Callable[[], Tensor], n: int,
    numerics: tuple[Any, ...], dequantize: Callable[..., Tensor] = dequantize_affine,
) -> Tensor | None:  # fmt: skip
    """The product, or None where no copy may be kept. `read` gives the codes (n, K); `numerics` begin with scales."""
    block, tensors = granularity.block_of((n, x.shape[1]), numerics[0].shape), numerics[:2]
    make = lambda: dequantize(read(), block, *numerics, x.dtype)  # noqa: E731
    with torch.no_grad():
        copy = float_copy((codes, *tensors), x.dtype, make, n * x.shape[1] * x.element_size())
    if copy is None:
        return None
    note(f"{name}.float_copy")
    return torch.nn.functional.linear(x, copy)
