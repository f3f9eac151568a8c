"""Adam8bit and AdamW8bit: moments of one byte, the fourth power of equidistant numbers."""

from __future__ import annotations

from .base import LowBitAdam


class Adam8bit(LowBitAdam):
    """Adam with moments of 8 bits: 2.03 bytes a parameter in place of 8. Arguments are those of `LowBitAdam`."""

    decoupled = False
    default_bits = 8


class AdamW8bit(Adam8bit):
    """AdamW with moments of 8 bits: 2.03 bytes a parameter in place of 8. Arguments are those of `LowBitAdam`."""

    decoupled = True
