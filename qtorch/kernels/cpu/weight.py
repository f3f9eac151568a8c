"""A quantized weight as the compiled kernels read it: the struct `Weight` of src/weight.h."""

from __future__ import annotations

import functools
import struct
import weakref
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from ...config import generation
from ...primitives.qdtype import qdtype
from ...primitives.scheme import Scheme
from ..registry import Problem, needs_matrix
from .library import TYPES, missing

STRUCT = struct.Struct("=14qd")

SIZES = {number: dtype.itemsize for dtype, number in TYPES.items()}
"""Bytes of an element by the number of its type."""


W = TypeVar("W", bound="CompiledWeight")


class CompiledWeight:
    """A weight as the compiled kernels read it: made once, while its tensors live and stay where they are.

    To ask the tensors on each call takes longer than a small layer.

    Attributes:
        about: what it was made of beside tensors.
        fields: values of the struct; none if the tensors do not lie in memory as the kernels need them.
    """

    __slots__ = ("_codes", "_generation", "_pointers", "_scale", "_zero_point", "about", "fields")

    _made: ClassVar[dict[int, Any]] = {}  # by the identity of the codes

    def __init_subclass__(cls) -> None:
        cls._made = {}

    def __init__(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *about: Any) -> None:
        """See `of`."""
        made, key = self._made, id(codes)
        self._codes = weakref.ref(codes, lambda _: made.pop(key, None))
        self._scale = weakref.ref(scale)
        self._zero_point = None if zero_point is None else weakref.ref(zero_point)
        self._pointers = (codes.data_ptr(), scale.data_ptr(), 0 if zero_point is None else zero_point.data_ptr())
        self._generation = generation.number
        self.about = about
        self.fields = _fields(codes, scale, zero_point, self._pointers, *about[:6])

    @classmethod
    def of(cls: type[W], codes: Tensor, scale: Tensor, zero_point: Tensor | None, *about: Any) -> W:
        """The weight that these tensors are.

        Args:
            codes: (N, K) int8 or uint8, or packed by `pack_codes` along K.
            scale: (N, G) or (1, 1).  zero_point: like scale, or None.
            about: N, K, the name of a `QDType`, whether codes are packed, the name of a `ZeroPointDomain`, the code of
                a FLOAT zero point, (low + high + 1) / 2; and what a subclass adds.
        """
        found = cls._made.get(id(codes))
        if found is None or found.about != about or not found.is_of(codes, scale, zero_point):
            found = cls._made[id(codes)] = cls(codes, scale, zero_point, *about)
        return found

    def is_of(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> bool:
        """Whether it was made of these tensors, none has moved since, and kernels are chosen as they were then."""
        # In one piece, and without the help of functions: it is run on each call.
        pointers = (codes.data_ptr(), scale.data_ptr(), 0 if zero_point is None else zero_point.data_ptr())
        return (
            self._codes() is codes
            and self._scale() is scale
            and (self._zero_point and self._zero_point()) is zero_point
            and self._pointers == pointers
            and self._generation == generation.number
        )


def _fields(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    pointers: tuple[int, ...],
    n: int,
    k: int,
    dtype: str,
    packed: bool,
    domain: str,
    middle: float,
) -> tuple[float, ...]:
    kind = qdtype(dtype)
    tensors = [scale] if zero_point is None else [scale, zero_point]
    if (
        codes.stride(1) != 1
        or (n > 1 and codes.stride(0) < codes.shape[1])
        or not all(t.is_contiguous() and t.dtype in TYPES for t in tensors)
    ):
        return ()
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
    return (bias, None) if bias is not None and fits(bias, x, n) else (None, bias)


def fits(bias: Tensor, x: Tensor, n: int) -> bool:
    """Whether the kernels can add it to the product of x, n columns wide."""
    return bias.dtype == x.dtype and bias.shape == (n,) and bias.is_contiguous()


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
