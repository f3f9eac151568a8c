"""Signal-to-quantization-noise ratio (SQNR), the measure of all accuracy checks of the library."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_error(x: Tensor, y: Tensor) -> Tensor:
    """SQNR of `y` as an approximation of `x`, in dB: 20 log10(|x| / |x - y|), Euclidean norms, a 0-d fp32 tensor.

    It is infinite if the two are equal, which in a test of a quantizer means that nothing was quantized.
    """
    x, y = x.detach().float(), y.detach().float()
    return 20 * torch.log10(torch.linalg.vector_norm(x) / torch.linalg.vector_norm(x - y))
