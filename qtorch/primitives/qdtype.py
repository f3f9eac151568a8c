"""QDType: the numbers a quantized code can take, one object per type.

AQT's insight: the disputes over 127, 127.5 and 128 end when the bounds of the code are a table, so here they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .floatx import FloatFormat
from .jsonable import register_string_reader
from .rounding import Rounding


@dataclass(frozen=True, eq=False)
class QDType:
    """A quantized element type. Compared by identity: there is one object per name.

    Attributes:
        name: ``"int4"``, ``"uint8"``, ``"float8_e4m3fn"``, ...
        bits: width of one code.
        quant_min, quant_max: smallest and largest code, as integers for integer types.
        storage: torch dtype that holds one unpacked code per element.
        is_floating_point: codes are floating-point numbers.
        format: of floating-point codes that torch has no dtype for; their storage is a uint8 of bits.
    """

    name: str
    bits: int
    quant_min: float
    quant_max: float
    storage: torch.dtype
    is_floating_point: bool = False
    format: FloatFormat | None = None

    @property
    def is_signed(self) -> bool:
        return self.quant_min < 0

    @property
    def has_nan(self) -> bool:
        """Whether a code stands for NaN."""
        return self.is_floating_point and self.format is None

    def encode(
        self, values: Tensor, rounding: Rounding = Rounding.NEAREST_EVEN, generator: torch.Generator | None = None
    ) -> Tensor:
        """Storage of fp32 `values`, which are within the bounds, and for integer types whole already.

        Args:
            rounding, generator: of floating-point types; those that torch has a dtype for round to nearest even only.

        Raises:
            ValueError: stochastic rounding to a type that lacks it.
        """
        if self.format is not None:
            return self.format.encode(values, rounding, generator)
        if self.is_floating_point and rounding is not Rounding.NEAREST_EVEN:
            raise ValueError(f"{self.name} rounds to nearest even only, got {rounding}")
        return values.to(self.storage)

    def decode(self, codes: Tensor) -> Tensor:
        """The fp32 values of codes in their storage dtype."""
        return codes.float() if self.format is None else self.format.decode(codes)

    def __repr__(self) -> str:
        return self.name

    def __json__(self) -> str:
        return f"QDType.{self.name}"

    # Copies and pickles of a type are the type itself.
    def __reduce__(self) -> tuple[Any, ...]:
        return qdtype, (self.name,)


def _integer_types() -> list[QDType]:
    signed = [QDType(f"int{b}", b, -(2 ** (b - 1)), 2 ** (b - 1) - 1, torch.int8) for b in range(1, 9)]
    unsigned = [QDType(f"uint{b}", b, 0, 2**b - 1, torch.uint8) for b in range(1, 9)]
    return signed + unsigned


def _float8_types() -> list[QDType]:
    names = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    dtypes = [(name, getattr(torch, name)) for name in names]
    return [QDType(name, 8, torch.finfo(dt).min, torch.finfo(dt).max, dt, True) for name, dt in dtypes]


def _small_float_types() -> list[QDType]:
    formats = [FloatFormat(e, m) for e, m in ((3, 2), (2, 3), (2, 2), (3, 1), (2, 1), (2, 0))]
    return [QDType(f.name, f.bits, -f.max, f.max, torch.uint8, True, f) for f in formats]


QDTYPES: dict[str, QDType] = {t.name: t for t in [*_integer_types(), *_float8_types(), *_small_float_types()]}
# int32 and int16 are no storage formats; they serve bit-exact comparison with torch's own primitives.
QDTYPES |= {
    name: QDType(name, torch.iinfo(dt).bits, torch.iinfo(dt).min, torch.iinfo(dt).max, dt)
    for name, dt in (("int16", torch.int16), ("int32", torch.int32))
}


def qdtype(dtype: QDType | torch.dtype | str) -> QDType:
    """The `QDType` for a torch dtype (``torch.int4``), a name (``"int4"``) or itself.

    Raises:
        ValueError: no such quantized type.
        TypeError: `dtype` is not one of the accepted kinds.
    """
    if isinstance(dtype, QDType):
        return dtype
    if not isinstance(dtype, torch.dtype | str):
        raise TypeError(f"expected a torch.dtype, a name or a QDType, got {type(dtype).__name__}")
    name = str(dtype).removeprefix("torch.")
    if name not in QDTYPES:
        raise ValueError(f"{dtype} is not a quantized type; known: {', '.join(QDTYPES)}")
    return QDTYPES[name]


register_string_reader("QDType", qdtype)
