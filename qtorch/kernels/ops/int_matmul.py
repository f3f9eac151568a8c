"""Exact integer matrix product: int8 x int8 -> int32.

    c[m, n] = sum_k a[m, k] * b[k, n]

On a CPU with 8-bit dot products (VNNI, AMX) `torch._int_mm` is fast; without them it is some 50 times slower than fp32,
and saturates. There the result is assembled from fp32 products over slices of K: a slice of 1024 terms of at most
128 * 128 stays within 2^24, where fp32 holds every integer, so each partial sum is exact. On CUDA it is a Triton
kernel, or cuBLAS where Triton is missing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import features
from ..custom_ops import note, opaque

EXACT_SLICE = 1024
"""Terms of an int8 dot product that fp32 can accumulate exactly: 2^24 / (128 * 128)."""


def _fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.int32)


@opaque("int_matmul(Tensor a, Tensor b) -> Tensor", _fake)
def int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """(M, K) int8 @ (K, N) int8 -> (M, N) int32, exact.

    Raises:
        ValueError: not int8 matrices, or the inner sizes differ.
    """
    if a.dtype != torch.int8 or b.dtype != torch.int8:
        raise ValueError(f"int_matmul takes int8 matrices, got {a.dtype} and {b.dtype}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"int_matmul takes (M, K) and (K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    if features.runs_triton(a):
        from ..cuda.triton.int8_scaled_mm import int8_scaled_mm

        note("int_matmul.triton")
        return int8_scaled_mm(a, b, None, None, torch.int32)
    if a.device.type == "cuda":
        return _cuda(a, b)
    if a.device.type == "cpu" and features.cpu_has("vnni"):
        note("int_matmul.vnni")
        # Of a transposed column, both strides are 1, and torch takes that for a row length.
        return torch._int_mm(a, b.flatten().unsqueeze(0) if b.shape[0] == 1 else b)
    return _sliced(a, b)


def _sliced(a: Tensor, b: Tensor) -> Tensor:
    note("int_matmul.sliced")
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32, device=a.device)
    for start in range(0, a.shape[1], EXACT_SLICE):
        stop = start + EXACT_SLICE
        total += torch.mm(a[:, start:stop].float(), b[start:stop].float()).to(torch.int32)
    return total


def _cuda(a: Tensor, b: Tensor) -> Tensor:
    """cuBLASLt's int8 product takes more than 16 rows and multiples of 8 of the rest: pad with zeros."""
    note("int_matmul.cublas")
    (m, k), n = a.shape, b.shape[1]
    rows, inner, columns = max(m, 17), -(-k // 8) * 8, -(-n // 8) * 8
    if (rows, inner, columns) == (m, k, n):
        return torch._int_mm(a, b)
    a, b = pad(a, (0, inner - k, 0, rows - m)), pad(b, (0, columns - n, 0, inner - k))
    return torch._int_mm(a, b)[:m, :n]


def int_scaled_matmul(a: Tensor, b: Tensor, scales1: Tensor) -> Tensor:
    """`int_matmul(a, b)` times a scale per row.

    Args:
        a: (M, K) int8.
        b: (K, N) int8.
        scales1: (M, 1), or 0-d; its dtype is the result's.
    """
    return int_matmul(a, b) * scales1
