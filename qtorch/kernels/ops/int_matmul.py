"""Exact integer matrix product: int8 x int8 -> int32.

    c[m, n] = sum_k a[m, k] * b[k, n]

On a CPU with 8-bit dot products (VNNI, AMX) `torch._int_mm` is fast; without them it is some 50 times slower than fp32,
and saturates. There the result is assembled from fp32 products over slices of K: a slice of 1024 terms of at most
128 * 128 stays within 2^24, where fp32 holds every integer, so each partial sum is exact. `cuda/shared_ops.py` has the
implementations for CUDA.

An int32 holds the sums of so many products of the widest codes only. Longer sums are those of slices of K, added up in
int64 (`int_sums`).
"""

import torch
from torch import Tensor

from .. import features
from ..custom_ops import note, opaque

EXACT_SLICE = 2**24 // (128 * 128)  # terms of an int8 dot product that fp32 can accumulate exactly
INT32_SLICE = 1 << 16  # terms of a slice of sums that an int32 need not hold


def int32_terms(left_zero: bool = False, right_zero: bool = False) -> int:
    """Terms of a dot product of 8-bit codes whose sum an int32 always holds. A code is at most 128 from zero, and at
    most 255 from a zero point; unsigned codes have one."""
    return (2**31 - 1) // ((255 if left_zero else 128) * (255 if right_zero else 128))


@opaque(lambda a, b: a.new_empty(a.shape[0], b.shape[1], dtype=torch.int32))
def int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """(M, K) int8 @ (K, N) int8 -> (M, N) int32, exact.

    Raises:
        ValueError: not int8 matrices, or the inner sizes differ or exceed 131071, where an int32 need not hold the
            sums; `int_scaled_matmul` takes those.
    """
    check_int8_matrices(a, b)
    if a.is_cpu and features.cpu_has("vnni"):
        note("int_matmul.vnni")
        return torch._int_mm(_readable(a), _readable(b))
    return _sliced(a.new_empty(a.shape[0], b.shape[1], dtype=torch.int32), a, b)


def int_matmul_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`int_matmul` on CPU, eager, into `out` (M, N) int32, memory that the caller has."""
    check_int8_matrices(a, b)
    note("int_matmul")
    if features.cpu_has("vnni"):
        note("int_matmul.vnni")
        torch._int_mm(_readable(a), _readable(b), out=out)
    else:
        _sliced(out, a, b)


def _readable(x: Tensor) -> Tensor:
    """As `torch._int_mm` takes it: it reads overlapping rows, and an axis of one element, by strides that are wrong."""
    (rows, columns), (row, column) = x.shape, x.stride()
    plain = (column == 1 and row >= columns) or (row == 1 and column >= rows)
    return x if plain and min(rows, columns) > 1 else x.flatten().view(rows, columns)


def check_int8_matrices(a: Tensor, b: Tensor) -> None:
    """Raise `ValueError` where these are not the operands of `int_matmul`."""
    if a.dtype != torch.int8 or b.dtype != torch.int8:
        raise ValueError(f"int_matmul takes int8 matrices, got {a.dtype} and {b.dtype}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"int_matmul takes (M, K) and (K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.shape[1] > int32_terms():
        raise ValueError(
            f"int_matmul: an int32 need not hold sums of {a.shape[1]} products, only of {int32_terms()}; "
            "int_scaled_matmul(a, b, scales1) takes them"
        )


def _sliced(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    note("int_matmul.sliced")
    sums = out.new_empty(out.shape, dtype=torch.float32)
    for start in range(0, max(a.shape[1], 1), EXACT_SLICE):
        stop = start + EXACT_SLICE
        torch.mm(a[:, start:stop].float(), b[start:stop].float(), out=sums)  # which autocast leaves alone
        out = out.add_(sums.to(torch.int32)) if start else out.copy_(sums)
    return out


def int_sums(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`int_matmul` of any length with sums in `dtype`: int32 where it holds them, else int64."""
    if dtype == torch.int32:
        return int_matmul(a, b)
    total = a.new_zeros(a.shape[0], b.shape[1], dtype=dtype)
    for start in range(0, a.shape[1], INT32_SLICE):
        total += int_matmul(a[:, start : start + INT32_SLICE], b[start : start + INT32_SLICE])
    return total


def int_scaled_matmul(a: Tensor, b: Tensor, scales1: Tensor) -> Tensor:
    """The exact ``a @ b`` of int8 (M, K) and (K, N), for a K of any length, times a scale per row: (M, 1), or 0-d; its
    dtype is the result's."""
    return int_sums(a, b, torch.int32 if a.shape[-1] <= int32_terms() else torch.int64) * scales1
