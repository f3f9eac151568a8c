"""The error of the output of a layer as a quadratic form of the error of its weight.

For inputs X (M, K) and the error D = W - Q (N, K) of the weight,

    |X W^T - X Q^T|^2 / M = sum_n d_n H d_n^T = tr(D H D^T),    H = X^T X / M

H is singular where inputs are linearly dependent, so it is damped: H + damping * mean(diag H) * I.

Source: GPTQ, arXiv 2210.17323, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

PRUNING_DAMPING = 0.01
"""Of H, where it says which elements matter."""

RETRIES = 6
"""Each retry damps ten times as much."""


def loss(error: Tensor, moment: Tensor) -> Tensor:
    """tr(D H D^T) by rows, (N,), for an error (N, K) and a second moment (K, K)."""
    return ((error @ moment) * error).sum(1)


def damped(moment: Tensor, damping: float, order: Tensor | None = None) -> Tensor:
    """H + damping * mean(diag H) * I in a new tensor; 1 on the diagonal for inputs that are always zero.

    Args:
        order: (K,) int64: of H with its rows and columns in this order.
    """
    added = damping * moment.diagonal().float().mean()
    result = moment.float().clone() if order is None else moment.float()[order.unsqueeze(1), order]
    diagonal = result.diagonal()
    diagonal[diagonal == 0] = 1.0 if float(added) == 0 else 0.0
    diagonal += added
    return result


def factor(moment: Tensor, damping: float, order: Tensor | None = None) -> tuple[Tensor, float]:
    """(the lower Cholesky factor of the damped H, the damping used), with more damping where the factorization fails.

    The factor takes the place of the damped H, so that one matrix (K, K) is in memory beside H.

    Args:
        order: as in `damped`.

    Raises:
        ValueError: H is not finite, or far from positive semi-definite.
    """
    if not bool(torch.isfinite(torch.stack(moment.aminmax())).all()):
        raise ValueError("the second moment of the inputs is not finite: the calibration data gives NaN or infinities")
    for _ in range(RETRIES):
        result = damped(moment, damping, order).mT  # the same matrix by columns, as LAPACK wants it
        failed = torch.empty((), dtype=torch.int32, device=result.device)
        torch.linalg.cholesky_ex(result, out=(result, failed))
        if not int(failed):
            return result, damping
        damping = max(damping, 1e-4) * 10
    raise ValueError(f"the second moment of the inputs is not positive definite, even with damping {damping / 10:g}")


def inverse_(lower: Tensor) -> Tensor:
    """H^-1 from the lower Cholesky factor of H, in its place."""
    return torch.cholesky_inverse(lower, out=lower)


def saliency(weight: Tensor, moment: Tensor) -> Tensor:
    """w^2 / (H^-1)_jj, (N, K): how much the error grows if an element becomes zero and all others make up for it.

    Source: Optimal Brain Surgeon; SparseGPT, arXiv 2301.00774, section 3.
    """
    lower, _ = factor(moment, PRUNING_DAMPING)
    return weight.float().square() / inverse_(lower).diagonal()
