"""The matrices of experts and the compiled function that multiplies with all of them: what a call needs besides its
input. As for linear layers (`compiled_linear.py`), the second product with a weight calls `grouped` at once.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import ways
from .compiled_library import TYPES, library, threads
from .compiled_linear import Numerics
from .memory import address, empty
from .structs import ExpertsCall, ExpertsIntCall, pack, struct_of
from .ways import WAYS
from .weight import CompiledWeight, has_short_groups

NO_LIMIT = 2**62
"""Rows of the last of the ways."""


class CompiledExperts(CompiledWeight):
    """The matrices of all experts as one weight (E * N, K), and the ways by the number of rows of an expert.

    A subclass has the function's `name` in `Library`, and `call`, the struct that it takes after the weight.

    Attributes:
        dtype: of x and y in calls of `grouped`.
        compiled, numerics: as in `CompiledLinear`.
    """

    __slots__ = (
        "_call",
        "_count",
        "_fastest",
        "_n",
        "_row",
        "_steps",
        "_ways",
        "_weight",
        "compiled",
        "dtype",
        "numerics",
    )

    name: ClassVar[str]
    call: ClassVar[type]

    def __init__(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *about: Any) -> None:
        """See `of`; the last of `about` are E, the dtype of y, the name of x in `ways`, and numerics."""
        super().__init__(codes, scale, zero_point, *about)
        n, k, _, packed, _, _, self._count, self.dtype, kind, self.numerics = about
        self._n, self._row = n // self._count, k
        self.compiled = library() if self.fields else None
        if self.compiled is None:
            return
        self._call, self._weight = getattr(self.compiled, self.name), pack(self.fields)
        # By the size of all, which stream through the caches even if each is small.
        instructions = self.compiled.instruction_set
        key = ways.key_of(kind, packed, scale.shape[-1] > 1, n * k, has_short_groups(self.fields))
        self._fastest = ways.steps(instructions, key)
        otherwise = WAYS["amx" if kind != "int8" and instructions == "amx" else "tile"]
        steps = [(NO_LIMIT if rows is None else rows, WAYS.get(way, otherwise)) for rows, way in self._fastest]
        self._steps = len(steps)
        self._ways = (ctypes.c_int64 * (2 * self._steps))(*(number for step in steps for number in step))

    @staticmethod
    def as_matrix(tensor: Tensor) -> Tensor:
        """(E, N, K) as (E * N, K), a view."""
        return tensor.view(-1, tensor.shape[-1])

    def is_fastest(self, rows: int) -> bool:
        """Whether the compiled call is at least as fast as other ways, for so many rows in all."""
        if self.compiled is None:
            return False
        mean = rows // self._count
        return next(way for most, way in self._fastest if most is None or mean <= most) in WAYS

    def run(self, x: Tensor, experts: Tensor, numerics: Numerics) -> tuple[Tensor, bool]:
        """y (T * R, N), and whether all of it is finite."""
        rows, share, n, dtype = experts.numel(), experts.shape[1], self._n, self.dtype
        y = empty((rows, n), dtype)
        # By position, in the order of the structs' fields.
        of_call = struct_of(self.call).pack(
            *(address(experts, torch.int64), rows, self._count, share, ctypes.addressof(self._ways), self._steps),
            *(address(x), TYPES[x.dtype], x.stride(0), x.shape[0]),
            *(address(y), TYPES[dtype], n, 0),
            *numerics,
            threads(),
        )
        return y, not self._call(self._weight + of_call)

    def grouped(self, x: Tensor, weight: Any, experts: Tensor) -> Tensor | None:
        """The product with the weight that this was made from; None if one compiled call cannot do it."""
        if (
            x.dtype is not self.dtype
            or x.dim() != 2
            or experts.dim() != 2
            or x.shape != (experts.shape[0], self._row)
            or experts.dtype is not torch.int64
            or not (x.is_cpu and experts.is_cpu and x.is_contiguous() and experts.is_contiguous())
            or not self.is_of(weight.qdata, weight.scale, weight.zero_point)
        ):
            return None
        rows = experts.numel()
        if not (rows and self.is_fastest(rows)):
            return None
        y, finite = self.run(x, experts, self.numerics)
        return y if finite else None

    @classmethod
    def prepare(cls, weight: Any) -> None:
        """Let the next product with this weight call `grouped` of what the last one made at once."""
        made = cls.made_of(weight.qdata)
        if made is not None and made.compiled is not None and made.dtype is weight.scheme.dtype:
            vars(weight)["fast_grouped"] = made.grouped


class FloatExperts(CompiledExperts):
    """For an input in floating point."""

    __slots__ = ()
    name, call = "experts_mm", ExpertsCall


class IntExperts(CompiledExperts):
    """For int8 activations."""

    __slots__ = ()
    name, call = "experts_int8_mm", ExpertsIntCall


def is_stack(codes: Tensor) -> bool:
    """Whether the rows of all experts are evenly spaced in memory."""
    return codes.stride(2) == 1 and codes.stride(0) == codes.shape[1] * codes.stride(1)
