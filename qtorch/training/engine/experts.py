"""Products with the matrices of experts through the engine: `F.grouped_mm`.

Each group of rows is a contraction of its own, with its gradients; scales are those of its operands. The offsets are
read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dtypes.einsum import Product, batched
from .contraction import contraction
from .spec import TrainingSpec


def grouped_mm_by(
    product: Product,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`F.grouped_mm` of these arguments, its matrices multiplied by `product`.

        (S, K), (E, K, N)      rows offs[e - 1] to offs[e] times matrix e; zeros after the last offset   (S, N)
        (E, M, K), (E, K, N)   without offsets                                                           (E, M, N)
        (M, K), (K, N)         the sum over k in offs[e - 1] to offs[e]                                  (E, M, N)
        (E, M, K), (K, N)      matrix e times columns offs[e - 1] to offs[e]                             (M, N)

    Raises:
        ValueError: a bias, which torch has none of either; offsets are missing, or not wanted.
    """
    both = mat_a.dim() == mat_b.dim() == 3
    if bias is not None or both is (offs is not None):
        raise ValueError("grouped_mm takes offs where an operand is a matrix, and no bias")
    if both:
        y = batched(mat_a, mat_b.transpose(1, 2), product)
    else:
        assert offs is not None
        stops: list[int] = offs.tolist()
        parts = list(zip([0, *stops], stops, strict=False))
        if mat_b.dim() == 3:
            matrices = mat_b.transpose(1, 2).unbind(0)
            of_groups = [product(mat_a[a:b], matrices[e]) for e, (a, b) in enumerate(parts) if b > a]
            y = torch.cat([*of_groups, mat_a.new_zeros(mat_a.shape[0] - max([0, *stops]), mat_b.shape[2])])
        elif mat_a.dim() == 3:
            y = torch.cat([product(mat_a[e], mat_b[:, a:b].t()) for e, (a, b) in enumerate(parts)], 1)
        else:
            y = torch.stack([product(mat_a[:, a:b], mat_b[a:b].t()) for a, b in parts])
    return y if out_dtype is None else y.to(out_dtype)


def quantized_grouped_mm(mat_a: Tensor, mat_b: Tensor, spec: TrainingSpec, offs: Tensor | None = None) -> Tensor:
    """`F.grouped_mm`: rows (S, K), sorted by expert, and matrices (E, K, N), those of expert e before ``offs[e]``.

    Other shapes, results and errors as in `grouped_mm_by`.
    """
    return grouped_mm_by(lambda a, b: contraction(a, b, spec), mat_a, mat_b, offs)
