"""Quantize a checkpoint in a process of its own; prints a line at the start, the growth of its memory at the end."""

from __future__ import annotations

import resource
import sys

import torch

import qtorch


def peak() -> int:
    """The largest size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(src: str, dst: str, format: str, limit: str) -> None:
    torch.set_num_threads(1)
    recipe = qtorch.int4_weight_only(group_size=32)
    recipe.apply(torch.randn(64, 64))
    before = peak()
    print("started", flush=True)
    qtorch.quantize_checkpoint(src, dst, recipe, format=format, max_shard_size=int(limit))
    print(peak() - before, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
