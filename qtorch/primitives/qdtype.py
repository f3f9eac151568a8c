"""QDType: the type of a code, one object per type, with the bounds of its codes.

The bounds are a table, as in AQT, which settles whether a scale divides by 127, 127.5 or 128.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from .floatx import FloatFormat, MidRise, SignedFormat, round_magnitudes
from .jsonable import register_string_reader
from .rounding import Rounding


@dataclass(frozen=True, eq=False, repr=False)
class QDType:
    """A quantized element type. Compared by identity: there is one object per name.

    Attributes:
        name: ``"int4"``, ``"uint8"``, ``"float8_e4m3fn"``, ...
        bits: width of one code.
        quant_min, quant_max: smallest and largest code; integers for integer types.
        storage: torch dtype that holds one unpacked code per element.
        is_floating_point: codes stand for floating-point numbers, or for half-integers.
        format: of such codes without a torch dtype, whose bits are stored as an integer.
    """

    name: str
    bits: int
    quant_min: float
    quant_max: float
    storage: torch.dtype
    is_floating_point: bool = False
    format: SignedFormat | None = None

    @property
    def is_small_integer(self) -> bool:
        """Whether it has integers of at most 8 bits, whose products kernels add up exactly."""
        return not self.is_floating_point and self.bits <= 8

    @property
    def has_zero(self) -> bool:
        """Whether 0.0 has a code."""
        return self.format is None or self.format.has_zero

    @property
    def is_signed(self) -> bool:
        return self.quant_min < 0

    @property
    def has_nan(self) -> bool:
        """Whether the type has a code for NaN."""
        return self.is_floating_point and self.format is None

    def encode(
        self, values: torch.Tensor, rounding: Rounding = Rounding.NEAREST_EVEN,
        generator: torch.Generator | None = None, noise: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Codes, in the storage dtype, of fp32 `values` within the bounds, which integer types need rounded; the other
        arguments are for floating-point types, see `round_to_integer`."""
        if self.format is not None:
            return self.format.encode(values, rounding, generator, noise)
        if self.is_floating_point and rounding is Rounding.STOCHASTIC:
            values = round_magnitudes(values, self._magnitudes, generator, noise)
        return values.to(self.storage)

    @functools.cached_property
    def _magnitudes(self) -> tuple[float, ...]:
        """The finite values of a floating-point type with a torch dtype that are not negative, ascending."""
        values = torch.arange(128, dtype=torch.uint8, device="cpu").view(self.storage).float()
        return tuple(values[values.isfinite()].tolist())

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The fp32 values of codes in their storage dtype."""
        return codes.float() if self.format is None else self.format.decode(codes)

    def __repr__(self) -> str:
        return self.name

    def __json__(self) -> str:
        return f"QDType.{self.name}"

    # Types are compared by identity, so a copy or a loaded pickle has to be the same object.
    def __reduce__(self) -> tuple[Any, ...]:
        return qdtype, (self.name,)


_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_FLOATS = ((3, 2), (2, 3), (2, 2), (3, 1), (2, 1), (2, 0))
_AQT_FLOATS = ((5, 0), (4, 1), (1, 4), (0, 5), (4, 0), (1, 3), (0, 4), (3, 0), (1, 2), (0, 3))
_WITHOUT_ZERO = ((3, 0), (2, 1), (1, 2), (0, 3))


def _signed_integer(bits: int) -> QDType:
    storage = torch.int8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32
    return QDType(f"int{bits}", bits, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, storage)


def _types() -> list[QDType]:
    """Integers beyond 8 bits, and midrise9 and wider, are for training alone: AQT goes up to 22 bits, which fp32 can
    still tell apart. Tests use int32 for bit-exact comparison with torch's own primitives."""
    types = [_signed_integer(bits) for bits in range(1, 9)]
    types += [QDType(f"uint{b}", b, 0, 2**b - 1, torch.uint8) for b in range(1, 9)]
    limits = {name: torch.finfo(getattr(torch, name)) for name in _FLOAT8}
    types += [QDType(name, 8, limit.min, limit.max, getattr(torch, name), True) for name, limit in limits.items()]
    formats: list[SignedFormat] = [FloatFormat(e, m) for e, m in (*_FLOATS, *_AQT_FLOATS)]
    formats += [FloatFormat(e, m, subnormals=False) for e, m in _WITHOUT_ZERO]
    formats += [MidRise(bits) for bits in range(1, 23)]
    types += [QDType(f.name, f.bits, -f.max, f.max, f.storage, True, f) for f in formats]
    return types + [_signed_integer(bits) for bits in (*range(9, 23), 32)]


QDTYPES: dict[str, QDType] = {kind.name: kind for kind in _types()}


def qdtype(dtype: QDType | torch.dtype | str) -> QDType:
    """The `QDType` of a torch dtype (``torch.int4``) or a name (``"int4"``); a `QDType` is returned as is.

    Raises:
        ValueError: there is no such quantized type.
        TypeError: `dtype` is not one of the accepted kinds.
    """
    if isinstance(dtype, QDType):
        return dtype
    if not isinstance(dtype, torch.dtype | str):
        raise TypeError(f"expected a torch.dtype, a name or a QDType, got {type(dtype).__name__}")
    name = str(dtype).removeprefix("torch.")
    if name not in QDTYPES:
        raise ValueError(f"{dtype} is not a quantized type; known: {', '.join([*QDTYPES][:18])}, ...")
    return QDTYPES[name]


register_string_reader("QDType", qdtype)
