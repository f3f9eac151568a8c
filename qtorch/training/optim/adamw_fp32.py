"""_AdamW: AdamW with moments in fp32, whatever the dtype of the parameter."""

from __future__ import annotations

from .base import LowBitAdam


class _AdamW(LowBitAdam):
    """AdamW in fp32, with one rounding of the parameter a step. Arguments are those of `LowBitAdam`.

    For bf16 models: their moments keep their precision, and `bf16_stochastic_round` that of their updates.
    """

    default_bits = 32
