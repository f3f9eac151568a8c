"""Adam4bit and AdamW4bit: moments of half a byte, the square of equidistant numbers."""

from __future__ import annotations

from .base import LowBitAdam


class Adam4bit(LowBitAdam):
    """Adam with moments of 4 bits: 1.06 bytes a parameter in place of 8. Arguments are those of `LowBitAdam`."""

    decoupled = False
    default_bits = 4
    default_block_size = 128


class AdamW4bit(Adam4bit):
    """AdamW with moments of 4 bits: 1.06 bytes a parameter in place of 8. Arguments are those of `LowBitAdam`."""

    decoupled = True
