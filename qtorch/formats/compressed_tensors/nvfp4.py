"""The scale of the tensor in NVFP4: files hold a divisor, tensors of this package a multiplier.

    of a file   scale of a group = weight_scale / weight_global_scale
    here        scale of a group = weight_scale * scale_scale

In fp32, the two agree for all the scales of a tensor if the scale is a power of two, and for some other numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TRIES = 8
"""Neighbours of 1 / scale that are tried as the divisor, on each side."""


def divisor_of(multiplier: Tensor, scale: Tensor) -> Tensor:
    """The fp32 number d for which ``scale / d == scale * multiplier`` in fp32, for all the scales.

    Args:
        multiplier: fp32, one element.
        scale: float8_e4m3fn, any shape.

    Raises:
        ValueError: there is none; the scale of the tensor was not chosen for it.
    """
    multiplier = multiplier.reshape(())
    codes = _distinct(scale)
    wanted = codes * multiplier
    nearest = multiplier.reciprocal()
    up = down = nearest
    tried = [nearest]
    for _ in range(_TRIES):
        up = torch.nextafter(up, torch.full_like(up, torch.inf))
        down = torch.nextafter(down, torch.zeros_like(down))
        tried += [up, down]
    for divisor in tried:
        if torch.equal(codes / divisor, wanted) and torch.equal(divisor.reciprocal(), multiplier):
            return divisor
    raise ValueError(
        f"has the scale {float(multiplier)!r} for the tensor, and the file holds its inverse, with which the scales of "
        "the groups differ; choose a power of two, nvfp4_weight_only(tensor_scale=...), as recipes_for_vllm() does"
    )


def multiplier_of(divisor: Tensor, scale: Tensor) -> Tensor | None:
    """The fp32 number m for which ``scale * m == scale / divisor`` in fp32, for all the scales, or None.

    Args:
        divisor: fp32, one element.
        scale: float8_e4m3fn, any shape.
    """
    multiplier = divisor.reshape(()).reciprocal()
    codes = _distinct(scale)
    if bool((codes == 0).any()) or not bool(torch.isfinite(multiplier)):
        return None
    return multiplier if torch.equal(codes * multiplier, codes / divisor.reshape(())) else None


def _distinct(scale: Tensor) -> Tensor:
    """The values that occur in a tensor of float8_e4m3fn, fp32."""
    return scale.view(torch.uint8).reshape(-1).unique().view(torch.float8_e4m3fn).float()
