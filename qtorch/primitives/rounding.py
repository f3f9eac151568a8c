"""Rounding to integers: to the nearest, ties to even, or stochastic."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from .jsonable import jsonable


@jsonable
class Rounding(enum.Enum):
    """How a real number becomes a code.

    NEAREST_EVEN: the nearest integer, ties to the even one (IEEE 754 roundTiesToEven).
    STOCHASTIC: up with probability x - floor(x), so that the expectation is x itself.
    """

    NEAREST_EVEN = "nearest_even"
    STOCHASTIC = "stochastic"


def round_to_integer(
    x: Tensor, rounding: Rounding = Rounding.NEAREST_EVEN, generator: torch.Generator | None = None
) -> Tensor:
    """Round a float tensor to integer values, same shape and dtype.

    Args:
        x: float tensor, any shape.
        rounding: see `Rounding`; STOCHASTIC is floor(x) + (u < x - floor(x)), u uniform on [0, 1).
        generator: source of u; torch's default generator if None.
    """
    if rounding is Rounding.NEAREST_EVEN:
        return torch.round(x)
    # In fp16 and bf16 neither u nor x - floor(x) is fine enough for small probabilities.
    dtype = torch.promote_types(x.dtype, torch.float32)
    if generator is None:
        noise = torch.rand_like(x, dtype=dtype)
    else:
        noise = torch.rand(x.shape, dtype=dtype, device=x.device, generator=generator)
    floor = torch.floor(x)
    # floor(x + u) would be wrong for large x, where x + u may round up to the next integer.
    return floor + (noise < x.to(dtype) - floor).to(x.dtype)
