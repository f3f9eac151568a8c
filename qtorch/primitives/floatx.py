"""Formats whose codes are a sign and the index of a magnitude: small floating-point formats, and half-integers.

A floating-point format has a sign bit, e exponent bits with bias 2^(e-1) - 1, and m mantissa bits, but no infinities
and no NaN, as in the OCP Microscaling specification v1.0, section 5.3. A code is
``sign << (e + m) | exponent << m | mantissa``:

    value = (-1)^sign * 2^(exponent - bias) * (1 + mantissa / 2^m)      exponent > 0
    value = (-1)^sign * 2^(1 - bias) * (mantissa / 2^m)                 exponent = 0

Without exponent bits all codes are of the second kind, with bias 1: fixed point. A format without subnormals has
exponents from 0 on, all of the first kind, and no code for zero (AQT, `fp_numerics.py`; its formats with subnormals are
those above times a power of two).

Magnitudes ascend with their codes, so both directions are look-ups in the table of magnitudes.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .rounding import Rounding, uniform


class SignedFormat:
    """Base of the formats: codes ``sign << (bits - 1) | index of the magnitude``, in uint8 up to 8 bits."""

    storage: ClassVar[torch.dtype] = torch.uint8

    @property
    def bits(self) -> int:
        raise NotImplementedError

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def magnitudes(self) -> tuple[float, ...]:
        """The values of the codes without a sign, ascending, 2^(bits - 1) of them."""
        raise NotImplementedError

    def encode(
        self, x: Tensor, rounding: Rounding = Rounding.NEAREST_EVEN, generator: torch.Generator | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Codes of `x` (fp32, any shape), saturating.

        Args:
            rounding: to the nearest value; or stochastically to one of the two neighbours, with expectation x.
            generator: source of the random numbers.
            noise: the random numbers themselves; see `round_to_integer`.
        """
        stochastic = rounding is Rounding.STOCHASTIC
        return self._encode(x, uniform(x, x.dtype, generator, noise) if stochastic else None)

    def _encode(self, x: Tensor, u: Tensor | None) -> Tensor:
        """Codes; stochastic rounding uses the random numbers `u`, rounding to nearest has None."""
        raise NotImplementedError

    @property
    def max(self) -> float:
        return self.magnitudes[-1]

    @property
    def has_zero(self) -> bool:
        """Whether 0.0 has a code."""
        return self.magnitudes[0] == 0

    def decode(self, codes: Tensor) -> Tensor:
        """Values (fp32) of codes."""
        values = torch.tensor(self.magnitudes, device=codes.device, dtype=torch.float32)
        magnitude = values[(codes & (2 ** (self.bits - 1) - 1)).long()]
        return torch.where(codes >> (self.bits - 1) > 0, -magnitude, magnitude)


@dataclass(frozen=True)
class FloatFormat(SignedFormat):
    """A floating-point format with a sign, `ebits` exponent and `mbits` mantissa bits.

    Args:
        subnormals: whether the smallest exponent is that of subnormal numbers and zero.
    """

    ebits: int
    mbits: int
    subnormals: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.ebits + self.mbits

    @property
    def name(self) -> str:
        """The name of the format, such as ``"float4_e2m1"``, as in the OCP specification; a final n is for normal
        numbers only."""
        return f"float{self.bits}_e{self.ebits}m{self.mbits}{'' if self.subnormals else 'n'}"

    @property
    def _smallest_normal(self) -> float:
        bias = 2 ** (self.ebits - 1) - 1 if self.ebits else 1
        return 2.0 ** (1 - bias) if self.subnormals else 1.0

    @functools.cached_property
    def magnitudes(self) -> tuple[float, ...]:
        if not self.subnormals:
            exponents, fractions = range(2**self.ebits), range(2**self.mbits)
            return tuple(2.0**e * (1 + m / 2**self.mbits) for e in exponents for m in fractions)
        values = []
        for code in range(2 ** (self.ebits + self.mbits)):
            exponent, mantissa = divmod(code, 2**self.mbits)
            fraction = mantissa / 2**self.mbits
            values.append(self._smallest_normal * (2.0 ** (exponent - 1) * (1 + fraction) if exponent else fraction))
        return tuple(values)

    def _encode(self, x: Tensor, u: Tensor | None) -> Tensor:
        """Ties go to the even code. Without a zero, what lies between the two smallest values goes to one of them,
        stochastically by the distance from each."""
        first, smallest = self.magnitudes[0], self._smallest_normal
        magnitude = x.abs().clamp(min=first, max=self.max)
        binade = floor_to_power_of_two(magnitude).clamp(min=smallest)
        # Codes are 2^-mbits of a binade apart, which has 2^mbits of them; subnormals go on below the first one.
        real = magnitude / binade * 2**self.mbits
        index = ((binade / smallest).contiguous().view(torch.int32) >> 23) - 127
        before = (index - int(not self.subnormals)) * 2**self.mbits
        if u is None:
            odd = before % 2 if self.mbits == 0 else 0  # a tie goes to an even code, of which `real` is a part
            code = torch.round(real - odd) + odd
        else:
            floor = torch.floor(real)
            code = floor + (u < real - floor)
        negative = torch.signbit(x)
        if u is not None and not self.has_zero:
            negative = torch.where(x.abs() < first, u * 2 * first >= x + first, negative)
        return (code.to(torch.int32) + before | (negative.int() << (self.bits - 1))).to(torch.uint8)


@dataclass(frozen=True)
class MidRise(SignedFormat):
    """Half-integers from -(2^(b-1) - 1/2) to 2^(b-1) - 1/2, without a zero: the codes of a mid-rise quantizer. To the
    nearest is floor(x) + 1/2, so that an integer goes up; of one bit are -1/2 and 1/2, the sign."""

    width: int

    @property
    def storage(self) -> torch.dtype:  # type: ignore[override]
        """int32 beyond 8 bits."""
        return torch.uint8 if self.width <= 8 else torch.int32

    @property
    def bits(self) -> int:
        return self.width

    @property
    def name(self) -> str:
        return f"midrise{self.width}"

    @functools.cached_property
    def magnitudes(self) -> tuple[float, ...]:
        return tuple(i + 0.5 for i in range(2 ** (self.width - 1)))

    def _encode(self, x: Tensor, u: Tensor | None) -> Tensor:
        if u is not None:
            x = x + (u - 0.5)
        half = 2 ** (self.bits - 1)
        if half == 1:
            return (x < 0).to(self.storage)
        bucket = torch.floor(x).clamp(-half, half - 1)
        return torch.where(bucket < 0, half - 1 - bucket, bucket).to(self.storage)

    def decode(self, codes: Tensor) -> Tensor:
        half, code = 2 ** (self.bits - 1), codes.float()
        return 0.5 - code if half == 1 else torch.where(code < half, code + 0.5, half - 0.5 - code)

    @property
    def max(self) -> float:
        return 2 ** (self.width - 1) - 0.5

    @property
    def has_zero(self) -> bool:
        return False


def stochastic_index(
    x: Tensor, values: Tensor, generator: torch.Generator | None = None, noise: Tensor | None = None
) -> Tensor:
    """The index of one of the two ascending `values` on either side of `x`, whose value has the expectation x; beyond
    the last ones it saturates. That of NaN is undefined."""
    x = x.clamp(values[0], values[-1])
    below = (torch.bucketize(x, values, right=True) - 1).clamp(0, len(values) - 2)
    low, high = values[below], values[below + 1]
    return below + (uniform(x, x.dtype, generator, noise) * (high - low) < x - low)


def round_magnitudes(
    x: Tensor, magnitudes: tuple[float, ...], generator: torch.Generator | None = None, noise: Tensor | None = None
) -> Tensor:
    """`x` (fp32) rounded stochastically to plus or minus one of the ascending `magnitudes`, the first of them zero,
    with expectation x; beyond the last it saturates. NaN stays."""
    values = x.new_tensor(magnitudes)
    rounded = values[stochastic_index(x.abs(), values, generator, noise)]
    return torch.where(x.isnan(), x, torch.copysign(rounded, x))


def floor_to_power_of_two(x: Tensor) -> Tensor:
    """The largest power of two not above `x` (fp32, positive, normal); zero for zero and subnormals."""
    exponent_bits = 0x7F800000
    return (x.contiguous().view(torch.int32) & exponent_bits).view(torch.float32)
