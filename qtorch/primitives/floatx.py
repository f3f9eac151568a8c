"""Small floating-point formats: encoding to and decoding from codes of 3 to 8 bits.

A format has a sign bit, e exponent bits with bias 2^(e-1) - 1, and m mantissa bits, but no infinities and no NaN, as in
the OCP Microscaling specification v1.0, section 5.3. A code is ``sign << (e + m) | exponent << m | mantissa`` in uint8:

    value = (-1)^sign * 2^(exponent - bias) * (1 + mantissa / 2^m)      exponent > 0
    value = (-1)^sign * 2^(1 - bias) * (mantissa / 2^m)                 exponent = 0

Magnitudes ascend with their codes, so both directions are look-ups in the table of magnitudes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .rounding import Rounding


@dataclass(frozen=True)
class FloatFormat:
    """A floating-point format with a sign, `ebits` exponent and `mbits` mantissa bits."""

    ebits: int
    mbits: int

    @property
    def bits(self) -> int:
        return 1 + self.ebits + self.mbits

    @property
    def name(self) -> str:
        """The name of the format, such as ``"float4_e2m1"``, as in the OCP specification."""
        return f"float{self.bits}_e{self.ebits}m{self.mbits}"

    @functools.cached_property
    def magnitudes(self) -> tuple[float, ...]:
        """The values of the codes without a sign, ascending, 2^(ebits + mbits) of them."""
        bias = 2 ** (self.ebits - 1) - 1
        values = []
        for code in range(2 ** (self.ebits + self.mbits)):
            exponent, mantissa = divmod(code, 2**self.mbits)
            fraction = mantissa / 2**self.mbits
            values.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
        return tuple(values)

    @property
    def max(self) -> float:
        return self.magnitudes[-1]

    @functools.cached_property
    def _last_of_code(self) -> tuple[float, ...]:
        """The largest fp32 magnitude that rounds to each code except the last; a tie goes to the even code."""
        limits = []
        for code, (low, high) in enumerate(zip(self.magnitudes, self.magnitudes[1:], strict=False)):
            middle = torch.tensor((low + high) / 2)
            limits.append(float(middle if code % 2 == 0 else torch.nextafter(middle, torch.tensor(0.0))))
        return tuple(limits)

    def encode(
        self, x: Tensor, rounding: Rounding = Rounding.NEAREST_EVEN, generator: torch.Generator | None = None
    ) -> Tensor:
        """Codes (uint8) of `x` (fp32, any shape), saturating.

        Args:
            rounding: to the nearest value, ties to the even code; or stochastically to one of the two neighbours, so
                that the expectation is x.
            generator: source of the random numbers.
        """
        magnitude = x.abs().clamp(max=self.max)
        if rounding is Rounding.NEAREST_EVEN:
            code = torch.bucketize(magnitude, x.new_tensor(self._last_of_code))
        else:
            values = x.new_tensor(self.magnitudes)
            below = torch.bucketize(magnitude, values, right=True) - 1
            low, high = values[below], values[(below + 1).clamp(max=len(values) - 1)]
            noise = torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)
            code = below + (noise * (high - low) < magnitude - low)
        return (code | (torch.signbit(x).long() << (self.bits - 1))).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Values (fp32) of codes (uint8)."""
        values = torch.tensor(self.magnitudes, device=codes.device)
        magnitude = values[(codes & (2 ** (self.bits - 1) - 1)).long()]
        return torch.where(codes >> (self.bits - 1) > 0, -magnitude, magnitude)


def floor_to_power_of_two(x: Tensor) -> Tensor:
    """The largest power of two not above `x` (fp32, positive, normal); zero for zero and subnormals."""
    exponent_bits = 0x7F800000
    return (x.contiguous().view(torch.int32) & exponent_bits).view(torch.float32)
