"""Pruning to a structure that kernels skip: 2:4, of each run of four along an axis at most two elements are not zero;
or blocks, of which each row of blocks keeps as many."""

import torch
from torch import Tensor


def prune_2_4(weight: Tensor) -> Tensor:
    """Keep the two largest magnitudes of each four elements along the last axis, and set the rest to zero.

    Of equal magnitudes the first are kept. A last run of less than four is padded with zeros.
    """
    return torch.where(mask_2_4(weight.detach().abs()), weight, 0)


def mask_2_4(importance: Tensor) -> Tensor:
    """Which elements are among the two most important, the first of equal ones, of each four along the last axis."""
    fours = runs_of_four(importance).unbind(-1)
    # An element is kept if fewer than two others are larger, or equal and before it.
    kept = []
    for i, x in enumerate(fours):
        beats = [y >= x if j < i else y > x for j, y in enumerate(fours) if j != i]
        kept.append(torch.stack(beats).sum(0, dtype=torch.uint8) < 2)
    return torch.stack(kept, -1).flatten(-2)[..., : importance.shape[-1]]


def is_2_4(tensor: Tensor) -> bool:
    """Whether at most two of each four elements along the last axis are not zero."""
    return not bool((runs_of_four(tensor) != 0).sum(-1).gt(2).any())


def runs_of_four(tensor: Tensor, multiple: int = 4) -> Tensor:
    """(..., K) -> (..., runs, 4), K padded with zeros to a multiple."""
    return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % multiple)).unflatten(-1, (-1, 4))


def kept_blocks(blocks: int, sparsity: float) -> int:
    """How many of `blocks` blocks remain when this share is dropped: the nearest number, at least one."""
    return max(1, round(blocks * (1 - sparsity)))


def mask_blocks(importance: Tensor, block_size: int, sparsity: float) -> Tensor:
    """Which elements of a matrix are in the blocks that `prune_blocks` keeps, (N, K) bool, with the same error.

    Args:
        importance: (N, K) not negative; the importance of a block is the sum of that of its elements.
    """
    shape = tuple(importance.shape)
    if len(shape) != 2 or block_size < 1 or any(size % block_size for size in shape):
        raise ValueError(f"blocks of {block_size} x {block_size} do not divide a matrix of shape {shape}")
    blocks = importance.unflatten(1, (-1, block_size)).unflatten(0, (-1, block_size)).sum((1, 3), dtype=torch.float32)
    best = blocks.argsort(dim=1, descending=True, stable=True)[:, : kept_blocks(blocks.shape[1], sparsity)]
    mask = torch.zeros_like(blocks, dtype=torch.bool).scatter_(1, best, True)
    return mask.repeat_interleave(block_size, 0).repeat_interleave(block_size, 1)


def prune_blocks(weight: Tensor, block_size: int, sparsity: float) -> Tensor:
    """Keep the blocks with the largest norms in each row of blocks, and set the rest to zero; differentiable.

    Args:
        weight: (N, K).
        block_size: rows and columns of a block.
        sparsity: share of the blocks that is dropped; see `kept_blocks`.

    Raises:
        ValueError: blocks do not divide the matrix.
    """
    return torch.where(mask_blocks(weight.detach().float().square(), block_size, sparsity), weight, 0)
