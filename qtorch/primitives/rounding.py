"""Rounding to integers: to the nearest, ties to even, or stochastic."""

import enum
from collections.abc import Sequence

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


@jsonable
class Noise:
    """The random numbers u of stochastic rounding, uniform on [0, 1).

    Args:
        shared_axes: axes of the tensor along which all elements round with the same u: fewer random numbers, and errors
            that are no longer independent along these axes.
        bits: u = (k + 1/2) / 2^bits with k uniform on the integers below 2^bits, which is symmetric about 1/2; None is
            `torch.rand` in fp32.

    Raises:
        ValueError: bits out of 1 to 23; an axis twice.
    """

    shared_axes: tuple[int, ...] = ()
    bits: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_axes", tuple(self.shared_axes))
        if self.bits is not None and not 1 <= self.bits <= 23:
            raise ValueError(f"Noise: bits is 1 to 23, which fp32 holds exactly, or None, got {self.bits}")
        if len(set(self.shared_axes)) < len(self.shared_axes):
            raise ValueError(f"Noise: shared_axes names an axis twice: {self.shared_axes}")

    def draw(self, shape: Sequence[int], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        """u for a tensor of this shape, fp32, expanded along the shared axes.

        Raises:
            ValueError: the tensor has no such axis.
        """
        ndim = len(shape)
        if any(not -ndim <= axis < ndim for axis in self.shared_axes):
            raise ValueError(f"{self} names an axis that a tensor of shape {tuple(shape)} does not have")
        shared = {axis % ndim for axis in self.shared_axes}
        drawn = [1 if axis in shared else size for axis, size in enumerate(shape)]
        if self.bits is None:
            u = torch.rand(drawn, device=device, generator=generator, dtype=torch.float32)
        else:
            k = torch.randint(1 << self.bits, drawn, device=device, generator=generator)
            u = (k.float() + 0.5) * 2.0**-self.bits
        return u.expand(tuple(shape))


def round_to_integer(
    x: Tensor,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Round a float tensor to integer values, same shape and dtype.

    Args:
        x: float tensor, any shape.
        rounding: see `Rounding`; STOCHASTIC is floor(x) + (u < x - floor(x)), u uniform on [0, 1).
        generator: source of u; torch's default generator if None.
        noise: u itself, of the shape of x, in place of a generator; see `Noise`.
    """
    if rounding is Rounding.NEAREST_EVEN:
        return torch.round(x)
    # In fp16 and bf16 neither u nor x - floor(x) is fine enough for small probabilities.
    dtype = torch.promote_types(x.dtype, torch.float32)
    floor = torch.floor(x)
    # floor(x + u) would be wrong for large x, where x + u may round up to the next integer.
    return floor + (uniform(x, dtype, generator, noise) < x.to(dtype) - floor).to(x.dtype)


def uniform(x: Tensor, dtype: torch.dtype, generator: torch.Generator | None, noise: Tensor | None) -> Tensor:
    """The random numbers of stochastic rounding of `x`, on [0, 1): `noise` if it is given."""
    if noise is None and generator is None:
        return torch.rand_like(x, dtype=dtype)  # of a shape that a compiler need not know
    return torch.rand(x.shape, dtype=dtype, device=x.device, generator=generator) if noise is None else noise
