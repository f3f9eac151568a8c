"""A call in a process of its own, to be killed or measured: ``python -m tests.attack.calls NAME ARGUMENT...``.

Prints a line when it starts, and at the end the growth of its memory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import qtorch
from qtorch.calibration import Nearest, auto, calibrated

WIDTH = 96


def start(name: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of this file that has started."""
    command = [sys.executable, "-m", "tests.attack.calls", name, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], env=environment, text=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def growth(name: str, *arguments: object) -> int:
    """Bytes by which the memory of a process grows."""
    process = start(name, *arguments)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0
    return int(said.split()[-1])


def peak() -> int:
    """The largest size of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


def begin() -> int:
    """Forget the largest size so far, that of an import for example; the size now."""
    if sys.platform != "linux":
        return 0
    Path("/proc/self/clear_refs").write_text("5")
    print("started", flush=True)
    return peak()


def end(before: int) -> None:
    print(peak() - before if before else 0, flush=True)


def quantize(src: str, dst: str, format: str, limit: str) -> None:
    recipe = qtorch.int4_weight_only(group_size=32)
    recipe.apply(torch.randn(64, 64))
    before = begin()
    qtorch.quantize_checkpoint(src, dst, recipe, format=format, max_shard_size=int(limit))
    end(before)


def calibrate(src: str, dst: str) -> None:
    """A checkpoint, one block in memory."""
    import transformers

    data = [{"input_ids": torch.arange(64).view(1, 64)}, {"input_ids": torch.arange(64, 128).view(1, 64)}]
    recipe = calibrated(qtorch.int4_weight_only(group_size=128), data, target=None, rounding=Nearest())
    recipe.recipe.apply(torch.randn(128, 128))
    assert transformers.LlamaForCausalLM
    before = begin()
    qtorch.quantize_checkpoint(src, dst, recipe, format="transformers")
    end(before)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def resume(result: str) -> None:
    """A model, with a folder beside the result to continue from."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.ModuleList(Block() for _ in range(6)), nn.Linear(WIDTH, 16))

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = model[0](x)
        for block in model[1]:
            x = block(x)
        return model[2](x)

    recipe = auto(qtorch.intx_weight_only("int3", group_size=16), list(torch.randn(8, 64, 16)), forward=forward)
    before = begin()
    qtorch.quantize_(model, recipe, resume=Path(result).with_suffix(".resume"))
    qtorch.save_quantized(model, result)
    end(before)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"quantize": quantize, "calibrate": calibrate, "resume": resume}[sys.argv[1]](*sys.argv[2:])
