"""Signal-to-quantization-noise ratio (SQNR), the measure of all accuracy checks of the library."""

import torch
from torch import Tensor

from .affine import check_tensors
from .slices import needs_slices, slice_elements


def compute_error(x: Tensor, y: Tensor) -> Tensor:
    """SQNR of `y` as an approximation of `x`, in dB: 20 log10(|x| / |x - y|), Euclidean norms, a 0-d fp32 tensor.

    It is infinite if the two are equal, which in a test of a quantizer means that nothing was quantized.
    """
    check_tensors("compute_error", x, y)
    x, y = x.detach(), y.detach()
    if x.shape == y.shape and needs_slices(x) and needs_slices(y):
        parts = [tensor.reshape(-1).split(slice_elements()) for tensor in (x, y)]
        return sqnr(combined_norms(torch.stack([norms(a, b) for a, b in zip(*parts, strict=True)])))
    return sqnr(norms(x, y))


def norms(x: Tensor, y: Tensor) -> Tensor:
    """(|x|, |x - y|), fp32."""
    x, y = x.float(), y.float()
    return torch.stack([torch.linalg.vector_norm(x), torch.linalg.vector_norm(x - y)])


def combined_norms(of_slices: Tensor) -> Tensor:
    """The norms (2,) of a whole, from those (S, 2) of its slices."""
    return torch.linalg.vector_norm(of_slices.double(), dim=0).float()


def sqnr(norms: Tensor) -> Tensor:
    """20 log10 of the quotient of the two `norms`."""
    return 20 * torch.log10(norms[0] / norms[1])
