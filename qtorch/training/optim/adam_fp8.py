"""AdamFp8 and AdamWFp8: moments in float8 e4m3."""

from __future__ import annotations

from .base import LowBitAdam


class AdamFp8(LowBitAdam):
    """Adam with moments in float8: 2.03 bytes a parameter in place of 8. Arguments are those of `LowBitAdam`."""

    decoupled = False
    default_bits = "fp8"


class AdamWFp8(AdamFp8):
    """AdamW with moments in float8: 2.03 bytes a parameter in place of 8. Arguments are those of `LowBitAdam`."""

    decoupled = True
