"""Quantize a checkpoint in a process of its own; prints a line at the start, the growth of its memory at the end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import qtorch


def peak() -> int:
    """The largest size of this process since `begin`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


def begin() -> int:
    """Forget the largest size so far, that of an import for example; the size now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def main(src: str, dst: str, format: str, limit: str) -> None:
    torch.set_num_threads(1)
    recipe = qtorch.int4_weight_only(group_size=32)
    recipe.apply(torch.randn(64, 64))
    before = begin()
    print("started", flush=True)
    qtorch.quantize_checkpoint(src, dst, recipe, format=format, max_shard_size=int(limit))
    print(peak() - before, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
