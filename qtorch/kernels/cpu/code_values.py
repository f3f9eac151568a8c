"""Codes that are no integers, as the compiled kernels read them: numbers of a table; see src/values.h."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...primitives.qdtype import QDTYPES, qdtype
from .memory import address

FLOATS = tuple(kind.name for kind in QDTYPES.values() if kind.is_floating_point and kind.bits <= 8)
"""Types of codes whose numbers are in a table."""

TABLE = "TABLE"
"""In place of the domain of a zero point: what stands for it is the table of the weight."""


class CodeValues(NamedTuple):
    """The numbers of codes.

    Attributes:
        table: (1, L) or (N, L) fp32, contiguous, L at least 16.
        length: how many codes there are.
        exponent, mantissa, bias, special: of numbers that are computed, as in `Weight`; zeros for others.
    """

    table: Tensor
    length: int
    exponent: int = 0
    mantissa: int = 0
    bias: int = 0
    special: int = 0

    @classmethod
    def of(cls, dtype: str, domain: str, table: Tensor | None) -> CodeValues | None:
        """Those of a weight; None for integers."""
        if domain == TABLE and table is not None:
            return cls.of_table(table)
        return cls.of_type(dtype) if dtype in FLOATS else None

    @classmethod
    def of_table(cls, table: Tensor) -> CodeValues:
        """Those of `table` (L,), or (N, 1, L), one for each row."""
        rows = table.detach().reshape(-1, table.shape[-1]).float()
        return cls(functional.pad(rows, (0, max(0, 16 - rows.shape[1]))).contiguous(), rows.shape[1])

    @classmethod
    @functools.cache
    def of_type(cls, dtype: str) -> CodeValues:
        """Those of a floating-point type of at most 8 bits."""
        kind = qdtype(dtype)
        codes = torch.arange(2**kind.bits, dtype=torch.uint8, device="cpu")
        numbers = kind.decode(codes.view(kind.storage))
        positive, negative = numbers.tensor_split(2)
        finite = int(positive.isfinite().sum())
        found = cls.of_table(numbers)
        if kind.bits <= 4 or not torch.equal(negative[:finite], -positive[:finite]):
            return found
        for mantissa in range(kind.bits - 1):
            bias = 1 - mantissa - round(math.log2(positive[1]))
            if positive[:finite].tolist() == [_number(code, mantissa, bias) for code in range(finite)]:
                return found._replace(exponent=kind.bits - 1 - mantissa, mantissa=mantissa, bias=bias, special=finite)
        return found

    def fields(self) -> dict[str, int]:
        """Of a `structs.Weight`."""
        values, stride = address(self.table, torch.float32), self.table.shape[1] if len(self.table) > 1 else 0
        computed = {name: getattr(self, name) for name in ("exponent", "mantissa", "bias", "special")}
        return {"center": 0, "values": values, "values_stride": stride, "values_count": self.length, **computed}


def _number(code: int, mantissa: int, bias: int) -> float:
    """What sign-less bits of an exponent and a mantissa stand for, subnormal numbers included."""
    exponent, fraction = divmod(code, 2**mantissa)
    return math.ldexp(fraction + (2**mantissa if exponent else 0), max(exponent, 1) - bias - mantissa)
