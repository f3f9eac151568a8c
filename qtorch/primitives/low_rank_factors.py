"""The best approximation of a matrix by a product of two thin ones, also for given inputs.

    left right = argmin |(A - left right) L|^2,    left (N, R), right (R, K), L L^T = E[x x^T] or the identity

By the theorem of Eckart, Young and Mirsky it is the truncated singular value decomposition of A L, whose right factor
is multiplied by L^-1. For inputs x it minimizes E|A x - left right x|^2 (QERA, arXiv 2410.06040, theorem 1).

The singular vectors are found by subspace iteration (Halko, Martinsson, Tropp, arXiv 0909.4061, algorithm 4.4), which
takes a few products with A in place of a whole decomposition.
"""

import torch
from torch import Tensor

_OVERSAMPLED = 16
_PASSES = 6


def low_rank_factors(matrix: Tensor, rank: int, root: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(left, right), (..., N, R) and (..., R, K), of equal size; zeros beyond min(N, K).

    Args:
        matrix: A, (..., N, K) fp32.
        root: lower triangular L, (K, K).
    """
    root = None if root is None else root.to(matrix.device)
    weighted = matrix if root is None else matrix @ root
    most = min(weighted.shape[-2:])
    if rank + _OVERSAMPLED < most // 2:
        # The same start for the same matrix, on every device.
        generator = torch.Generator(device="cpu").manual_seed(0)
        shape = weighted.shape[-1], rank + _OVERSAMPLED
        start = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        basis = torch.linalg.qr(weighted @ start.to(weighted)).Q
        for _ in range(_PASSES):
            basis = torch.linalg.qr(weighted @ torch.linalg.qr(weighted.mT @ basis).Q).Q
        u, s, v = torch.linalg.svd(basis.mT @ weighted, full_matrices=False)
        u = basis @ u
    else:
        u, s, v = torch.linalg.svd(weighted, full_matrices=False)
    values = s[..., :rank].sqrt()
    left, right = u[..., :rank] * values.unsqueeze(-2), values.unsqueeze(-1) * v[..., :rank, :]
    if root is not None:
        right = torch.linalg.solve_triangular(root, right, upper=False, left=False)
    missing = max(0, rank - most)
    padded = torch.nn.functional.pad(left, (0, missing)), torch.nn.functional.pad(right, (0, 0, 0, missing))
    return padded[0].contiguous(), padded[1].contiguous()
