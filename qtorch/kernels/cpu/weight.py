"""A quantized weight as the compiled kernels read it: the struct `Weight` of src/weight.h."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

from torch import Tensor

from ...primitives.qdtype import qdtype
from ...primitives.scheme import Scheme
from ..registry import Problem, needs_matrix
from .library import TYPES, missing

FORMAT = "14qd"

SIZES = {number: dtype.itemsize for dtype, number in TYPES.items()}
"""Bytes of an element by the number of its type."""


class _Known(NamedTuple):
    """Fields of a weight, and what they were made of."""

    codes: weakref.ref[Tensor]
    scale: weakref.ref[Tensor]
    zero_point: weakref.ref[Tensor] | None
    pointers: tuple[int, ...]
    about: tuple[Any, ...]
    fields: tuple[float, ...] | None


_known: dict[int, _Known] = {}
"""By the identity of the codes, while they live: to ask the tensors on each call takes longer than a small layer."""


def fields(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    shape: tuple[int, int],
    dtype: str,
    packed: bool,
    domain: str = "INT",
    middle: float = 0.0,
) -> tuple[float, ...] | None:
    """Values of the struct; None if the tensors do not lie in memory as the kernels need them.

    Args:
        codes: (N, K) int8 or uint8, or with `packed` the result of `pack_codes` along K.
        scale: (N, G) or (1, 1).  zero_point: like scale, or None.
        shape: (N, K).
        dtype: name of a `QDType`.
        middle: code of a FLOAT zero point, (low + high + 1) / 2.
    """
    key, about = id(codes), (shape, dtype, packed, domain, middle)
    pointers = (codes.data_ptr(), scale.data_ptr(), 0 if zero_point is None else zero_point.data_ptr())
    known = _known.get(key)
    if (
        known is not None
        and (known.about, known.pointers) == (about, pointers)
        and known.codes() is codes
        and known.scale() is scale
        and (known.zero_point and known.zero_point()) is zero_point
    ):
        return known.fields
    made = _fields(codes, scale, zero_point, pointers, *about)
    _known[key] = _Known(
        weakref.ref(codes, lambda _: _known.pop(key, None)),
        weakref.ref(scale),
        None if zero_point is None else weakref.ref(zero_point),
        pointers,
        about,
        made,
    )
    return made


def _fields(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    pointers: tuple[int, ...],
    shape: tuple[int, int],
    dtype: str,
    packed: bool,
    domain: str,
    middle: float,
) -> tuple[float, ...] | None:
    (n, k), kind = shape, qdtype(dtype)
    tensors = [scale] if zero_point is None else [scale, zero_point]
    if (
        codes.stride(1) != 1
        or (n > 1 and codes.stride(0) < codes.shape[1])
        or not all(t.is_contiguous() and t.dtype in TYPES for t in tensors)
    ):
        return None
    half = 2 ** (kind.bits - 1)
    center = half if packed or not kind.is_signed else 0
    zero_code = 0 if kind.is_signed else half
    groups = scale.shape[1]
    return (
        pointers[0],
        codes.stride(0),
        kind.bits if packed else 0,
        center,
        n,
        k,
        k // groups,
        groups,
        pointers[1],
        TYPES[scale.dtype],
        groups if scale.shape[0] > 1 else 0,
        pointers[2],
        0 if zero_point is None else TYPES[zero_point.dtype],
        domain != "FLOAT",
        zero_code - (middle if domain == "FLOAT" else 0.0),
    )


def part(values: tuple[float, ...], start: int, stop: int) -> tuple[float, ...]:
    """The struct of rows `start` to `stop` of the weight whose struct has these values."""
    codes, row_bytes, bits, center, _, k, group, groups, scale, scale_type, stride, zero, zero_type, *rest = values
    return (
        codes + start * row_bytes,
        row_bytes,
        bits,
        center,
        stop - start,
        k,
        group,
        groups,
        scale + start * stride * SIZES[int(scale_type)],
        scale_type,
        stride,
        zero and zero + start * stride * SIZES[int(zero_type)],
        zero_type,
        *rest,
    )


@functools.lru_cache(maxsize=1024)
def form(scheme: Scheme) -> tuple[bool, str, float, float, str]:
    """What operators are told of a weight beside its tensors: packed, dtype, low, high and domain."""
    spec = scheme.weight
    low, high = spec.code_range
    packed = scheme.layout.packed_axis is not None
    return packed, spec.dtype.name, float(low), float(high), spec.zero_point_domain.name


def split_bias(bias: Tensor | None, x: Tensor, n: int) -> tuple[Tensor | None, Tensor | None]:
    """(what the kernels add, what is left to add): one of the two is None. A bias of another dtype is promoted as torch
    does."""
    fits = bias is not None and bias.dtype == x.dtype and bias.shape == (n,) and bias.is_contiguous()
    return (bias, None) if fits else (None, bias)


def supports(problem: Problem) -> str | None:
    """What all compiled kernels ask of a weight; why not, or None."""
    if reason := needs_matrix(problem):
        return reason
    scheme = problem.scheme
    if scheme.layout.packed_axis not in (None, -1):
        return "takes codes packed along rows, this weight is transposed"
    shape = scheme.weight.scale_shape(scheme.shape)
    if 0 in scheme.shape or (shape[0] != scheme.shape[0] and shape != (1, 1)):
        return f"takes scales per row, group of a row or tensor, the weight has {scheme.weight.granularity}"
    return missing()
