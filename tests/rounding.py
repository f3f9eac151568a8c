"""How far apart two ways to add up the same products may be, in any order of the additions, on any processor.

A sum of n terms, each of them the product of two numbers, has an error of at most gamma(n) times the sum of their
magnitudes, gamma(n) = n u / (1 - n u), with u half the machine epsilon (Higham, Accuracy and Stability of Numerical
Algorithms, section 3.1). The order that a library takes depends on the processor, the threads and the shape.
"""

import torch
from torch import Tensor

EXTRA = 4
"""Roundings beside those of the sum: of the codes times their scale, of scales applied afterwards, of the bias."""


def gamma(terms: int, dtype: torch.dtype = torch.float32) -> float:
    unit = torch.finfo(dtype).eps / 2
    return terms * unit / (1 - terms * unit)


def magnitude(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What the sums of x @ weight.t() are made of, (..., N), in fp64."""
    size = x.double().abs() @ weight.double().abs().mT
    return size if bias is None else size + bias.double().abs()


def assert_same_product(got: Tensor, wanted: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Both are x @ weight.t() + bias, added up in fp32."""
    assert_same_sums(got, wanted, x.shape[-1], magnitude(x, weight, bias))


def assert_same_sums(got: Tensor, wanted: Tensor, terms: int, size: Tensor) -> None:
    """Both are sums of as many products, added up in fp32; the magnitudes of the products add up to `size`."""
    assert (got.shape, got.dtype, wanted.dtype) == (wanted.shape, torch.float32, torch.float32)
    excess = (got.double() - wanted.double()).abs() - 2 * gamma(terms + EXTRA) * size.double()
    assert bool((excess <= 0).all()), f"differs by {float(excess.max()):.3g} more than rounding can"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of floats are equal in every bit, with zeros of either sign and NaN told apart."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))
