"""`int_matmul` on CUDA: by Triton, or by cuBLASLt where Triton is missing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import features
from ..custom_ops import implement, note
from ..ops.int_matmul import check_int8_matrices

_HAS_TRITON = features.cuda_lacks("triton") is None


@implement("int_matmul", "cuda", where=_HAS_TRITON)
def triton_int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """See `int_matmul`."""
    from .triton.int8_scaled_mm import int8_scaled_mm

    check_int8_matrices(a, b)
    note("int_matmul.triton")
    return int8_scaled_mm(a, b, None, None, torch.int32)


@implement("int_matmul", "cuda", where=not _HAS_TRITON)
def cublas_int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """See `int_matmul`. cuBLASLt takes more than 16 rows and multiples of 8 of the rest: pad with zeros."""
    check_int8_matrices(a, b)
    note("int_matmul.cublas")
    (m, k), n = a.shape, b.shape[1]
    rows, inner, columns = max(m, 17), -(-k // 8) * 8, -(-n // 8) * 8
    if (rows, inner, columns) == (m, k, n):
        return torch._int_mm(a, b)
    a, b = pad(a, (0, inner - k, 0, rows - m)), pad(b, (0, columns - n, 0, inner - k))
    return torch._int_mm(a, b)[:m, :n]
