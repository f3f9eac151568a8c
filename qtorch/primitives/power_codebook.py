"""PowerSpec: a look-up table whose values are powers of equidistant numbers.

    signed      table[c] = sign(c - C) (|c - C| / N)^p,    C = 2^(bits - 1),    N = C - 1
    unsigned    table[c] = (c / N)^p,                      N = 2^bits - 1

Zero is a value, one and (signed) minus one are too, and steps grow with the magnitude: with p = 4 and 8 bits they are
3.1 % of the value (unsigned: 1.6 %) at one, and 31 % (16 %) at 1e-4. So numbers of very different sizes share a scale,
as the moments of Adam need; and a kernel computes values and nearest codes by multiplications and roots, without
reading the table.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from .codebook_spec import CodebookSpec
from .granularity import PerRow
from .jsonable import jsonable, to_json
from .qdtype import QDType, qdtype


@functools.cache
def power_table(bits: int, power: int, signed: bool) -> tuple[float, ...]:
    """The table at the top of the file, its arithmetic in fp32: |k| times the rounded 1 / N, squared once or twice.

    Raises:
        ValueError: `power` is not 2 or 4, or `bits` not 2 to 8.
    """
    if power not in (2, 4) or not 2 <= bits <= 8:
        raise ValueError(f"power_table takes 2 to 8 bits and the power 2 or 4, got {bits} bits and the power {power}")
    codes = torch.arange(2**bits) - (2 ** (bits - 1) if signed else 0)
    highest = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    values = codes.abs().float() * (torch.ones(()) / highest)
    for _ in range(power // 2):
        values = values * values
    return tuple((values * codes.sign()).tolist())


@jsonable
@dataclass(frozen=True)
class PowerSpec(CodebookSpec):
    """A `CodebookSpec` with the table at the top of the file, which `table` need not give.

    Args:
        power: 2 or 4.
        signed: whether the values have signs; the codes are unsigned either way.

    Raises:
        ValueError: `table` is another one, or an argument is out of range.
    """

    power: int = 4
    signed: bool = True

    def __post_init__(self) -> None:
        table = power_table(qdtype(self.dtype).bits, self.power, self.signed)
        if self.table not in (None, table):
            raise ValueError(f"PowerSpec computes its table, which is not {self.table}; leave it out")
        object.__setattr__(self, "table", table)
        super().__post_init__()
        # `super` makes a copy; with one object for all, comparisons of specs are short.
        object.__setattr__(self, "table", table)

    def __json__(self) -> dict[str, Any]:
        fields = ("dtype", "granularity", "scale_dtype", "scale_spec", "power", "signed")
        return {"type": "PowerSpec", **{name: to_json(getattr(self, name)) for name in fields}}

    def __str__(self) -> str:
        sign = "signed" if self.signed else "unsigned"
        return f"{self.dtype.name} {sign} power {self.power} {self.granularity!r}"


def power_spec(dtype: QDType | str, power: int, signed: bool) -> PowerSpec:
    """A spec whose rows share a scale."""
    return PowerSpec(qdtype(dtype), PerRow(), power=power, signed=signed)
