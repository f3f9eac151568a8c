"""Weights in NVFP4, as several formats store them.

codes        uint8 (O, I / 2), e2m1, the low nibble first
scale        e4m3 (O, I / 16)
scale of s   fp32, one for the tensor, a factor
w = q * (scale * scale of s)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..recipes.nvfp4 import BLOCK
from .bit_stream import unpack_nibbles

_SMALLEST_E4M3 = 2.0**-9


def nvfp4_parts(packed: Tensor, scale: Tensor, of_scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes and the other tensors of a weight.

    Scales are positive here: where one is zero, so are the reals, and the codes become zero instead.

    Raises:
        ValueError: a scale is negative or NaN, or the scale of scales is not a positive normal number.
    """
    factor = float(of_scale.reshape(()))
    if not torch.finfo(torch.float32).tiny / _SMALLEST_E4M3 <= factor < float("inf"):
        raise ValueError(f"the scale of its scales is {factor}; it must be a positive normal number")
    values = scale.float()
    if not bool((values >= 0).all()):
        raise ValueError("one of its scales is negative or NaN")
    codes = unpack_nibbles(packed)
    if bool((values == 0).any()):
        codes = codes.masked_fill((values == 0).repeat_interleave(BLOCK, -1), 0)
    return codes, {"scale": scale, "scale_scale": of_scale.float().reshape(1)}
