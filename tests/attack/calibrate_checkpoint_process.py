"""Calibrate a checkpoint in a process of its own; prints the growth of its memory."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import qtorch
from qtorch.calibration import Nearest, calibrated


def begin() -> int:
    """Forget the largest size so far, which includes that of the process that started this one; the size now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The largest size of this process since `begin`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


def main(source: str, result: str) -> None:
    import transformers

    torch.set_num_threads(1)
    data = [{"input_ids": torch.arange(64).view(1, 64)}, {"input_ids": torch.arange(64, 128).view(1, 64)}]
    recipe = calibrated(qtorch.int4_weight_only(group_size=128), data, target=None, rounding=Nearest())
    recipe.recipe.apply(torch.randn(128, 128))
    assert transformers.LlamaForCausalLM
    before = begin()
    qtorch.quantize_checkpoint(source, result, recipe, format="transformers")
    print(peak() - before, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
