"""A floating-point activation times int8 codes as integer products of torch, on a CPU that has fast ones.

    x[m, k] = sum_s xs[m] / 254^s * q[s, m, k],    xs[m] = max_k |x[m, k]| / 127,    q int8
    y[m, n] = sum_s xs[m] / 254^s * (sum_k q[s, m, k] * c[n, k])

The input is written in fixed point: each slice is the rounded remainder of the slices before it. The sums in brackets
are exact. Three slices are as accurate as fp32 is for the largest number of a row. The compiled kernels do the same
(cpu/src/quantize.h). The weight is not converted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import features
from ..custom_ops import note
from .int_matmul import int32_terms, int_matmul

SLICES = 3

MAX_RATIO = 2.0**8
"""Most that the largest number of a row may exceed the mean magnitude; beyond it the small ones lose precision."""

LEAST_CODES = 1 << 20
"""Least codes of a weight; with fewer, the calls take longer than the product (measured)."""

COLUMNS_PER_ROW = 8
"""Least columns per row of the input; with fewer, adding up slices takes longer than the product (measured)."""


def fixed_point_mm(x: Tensor, codes: Tensor) -> Tensor | None:
    """The equation above, or None where another method is better: for other dtypes or processors, small weights, many
    rows, and rows in which a few numbers are far larger than the others. A NaN or an infinity in a row makes its
    results NaN.

    Args:
        x: (M, K) fp32.
        codes: (N, K) int8.

    Returns:
        (M, N) fp32.
    """
    if x.dtype is not torch.float32 or x.device.type != "cpu" or not x.numel() or not features.cpu_has("vnni"):
        return None
    if codes.numel() < LEAST_CODES or COLUMNS_PER_ROW * x.shape[0] > x.shape[1] or x.shape[1] > int32_terms():
        return None
    size = x.abs()
    high = size.amax(1, keepdim=True)
    lost = high * 0  # NaN for rows that hold a NaN or an infinity
    fits = (high <= MAX_RATIO * size.mean(1, keepdim=True)) & ((high == 0) | (high > 2.0**-90)) | (lost != 0)
    if not bool(fits.all()):
        return None
    note("fixed_point_mm")
    scale = torch.where(high == 0, 1.0, high / 127) + lost
    slices, scales, rest = [], [], x
    for _ in range(SLICES):
        q = (rest / scale).round_()
        rest = rest - q * scale
        slices.append(q.to(torch.int8))
        scales.append(scale)
        scale = scale / 254
    sums = int_matmul(torch.cat(slices), codes.t()).unflatten(0, (SLICES, -1))
    return (sums * torch.stack(scales)).sum(0)
