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
from torch import Tensor

from .affine import check_floating_point
from .codebook_spec import CodebookSpec
from .granularity import BlockView, PerRow
from .jsonable import jsonable, to_json
from .qdtype import QDType, qdtype
from .slices import in_slices


@functools.cache
def power_table(bits: int, power: int, signed: bool) -> tuple[float, ...]:
    """The table at the top of the file, its arithmetic in fp32: |k| times the rounded 1 / N, squared once or twice.

    Raises:
        ValueError: `power` is not 2 or 4, or `bits` not 2 to 8.
    """
    if power not in (2, 4) or not 2 <= bits <= 8:
        raise ValueError(f"power_table takes 2 to 8 bits and the power 2 or 4, got {bits} bits and the power {power}")
    codes = torch.arange(2**bits, device="cpu") - (2 ** (bits - 1) if signed else 0)
    highest = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    values = codes.abs().float() * torch.ones((), dtype=torch.float32, device="cpu").div(highest)
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

    def quantize(self, input: Tensor, scale: Tensor, table: Tensor) -> Tensor:
        """Codes of `input`, uint8: the nearest values, of two the one nearer to zero; that of a NaN is undefined.

        With N^p |x / scale| = y between k^p and (k + 1)^p, the code is k where y is at most their middle, in fp32. As
        in `quantize_affine`, the division is a multiplication by the reciprocal.
        """
        check_floating_point("quantize", input)
        view = BlockView(input.shape, self.block_size(input.shape))
        highest = 2 ** (self.dtype.bits - 1) - 1 if self.signed else 2**self.dtype.bits - 1
        half = torch.arange(highest, dtype=torch.float32, device=input.device) + 0.5
        square = half * half
        middles = (square + 1.5) * square + 0.0625 if self.power == 4 else square + 0.25

        def quantize(x: Tensor, s: Tensor) -> Tensor:
            place = x.float() * (1.0 / s.float())
            size = place.abs() * torch.tensor(float(highest**self.power), device=x.device, dtype=torch.float32)
            codes = torch.bucketize(size, middles, out_int32=True)
            if self.signed:
                codes = torch.where(place < 0, -codes, codes) + (highest + 1)
            return codes.to(torch.uint8)

        x = view.split(input)
        return view.merge(in_slices(quantize, x, view.split_scale(scale), axes=x.dim()))

    def __json__(self) -> dict[str, Any]:
        fields = ("dtype", "granularity", "scale_dtype", "scale_spec", "power", "signed")
        return {"type": "PowerSpec", **{name: to_json(getattr(self, name)) for name in fields}}

    def __str__(self) -> str:
        sign = "signed" if self.signed else "unsigned"
        return f"{self.dtype.name} {sign} power {self.power} {self.granularity!r}"


def power_spec(dtype: QDType | str, power: int, signed: bool) -> PowerSpec:
    """A spec whose rows share a scale."""
    return PowerSpec(qdtype(dtype), PerRow(), power=power, signed=signed)
