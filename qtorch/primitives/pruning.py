"""2:4 semi-structured sparsity: of each run of four along an axis, at most two elements are not zero."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def prune_2_4(weight: Tensor) -> Tensor:
    """Keep the two largest magnitudes of each four elements along the last axis, and set the rest to zero.

    Of equal magnitudes the first are kept. A last run of less than four is padded with zeros.
    """
    fours = runs_of_four(weight)
    magnitudes = fours.abs().unbind(-1)
    # An element is kept if fewer than two others are larger, or equal and before it.
    kept = []
    for i, x in enumerate(magnitudes):
        beats = [y >= x if j < i else y > x for j, y in enumerate(magnitudes) if j != i]
        kept.append(torch.stack(beats).sum(0, dtype=torch.uint8) < 2)
    return torch.where(torch.stack(kept, -1), fours, 0).flatten(-2)[..., : weight.shape[-1]].contiguous()


def is_2_4(tensor: Tensor) -> bool:
    """Whether at most two of each four elements along the last axis are not zero."""
    return not bool((runs_of_four(tensor) != 0).sum(-1).gt(2).any())


def runs_of_four(tensor: Tensor, multiple: int = 4) -> Tensor:
    """(..., K) -> (..., runs, 4), K padded with zeros to a multiple."""
    return pad(tensor, (0, -tensor.shape[-1] % multiple)).unflatten(-1, (-1, 4))
