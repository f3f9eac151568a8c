"""A call in a process of its own, to be killed or measured: ``python -m tests.attack.calls NAME ARGUMENT...``.

Prints a line when it starts, and at the end the growth of its memory.
"""

import itertools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
import qtorch.checkpoint.save_load
from qtorch.calibration import Nearest, auto, calibrated
from tests.checkpoint_model import quantized

WIDTH = 96


def start(name: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of this file that has started."""
    words = [sys.executable, "-m", "tests.attack.calls", name, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words, cwd=Path(__file__).parents[2], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
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
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


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


# --- saves ---
def constant(value: float, width: int = WIDTH, count: int = 6) -> nn.Sequential:
    """Layers that are full of a number, some of them quantized."""
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)]).requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(value)
    if count > 3:
        qtorch.quantize_(model, {"[0-2]": qtorch.int8_weight_only()})
    return model


def value_in(path: Path, width: int = WIDTH, count: int = 6, mmap: bool = False) -> float:
    """The number that all weights of the checkpoint are."""
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])
    qtorch.load_quantized(model, path, mmap=mmap)
    (value,) = {float(value) for layer in model for value in layer.weight.detach().dequantize().unique()}
    return value


def save_forever(path: str, shard_size: str) -> None:
    """Zeros and ones in turn."""
    models = [constant(0.0), constant(1.0)]
    for i in itertools.count():
        qtorch.save_quantized(models[i % 2], path, max_shard_size=int(shard_size))
        if i == 0:
            print("started", flush=True)


def save_when_asked(path: str, shard_size: str) -> None:
    """The number of each line of the input, in a process that the parent of this one kills at a time of its own."""
    models = [constant(0.0), constant(1.0)]
    qtorch.save_quantized(models[0], path, max_shard_size=int(shard_size))
    print("started", flush=True)
    for line in sys.stdin:
        if not (child := os.fork()):
            qtorch.save_quantized(models[int(line)], path, max_shard_size=int(shard_size))
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def save_and_die(folder: str) -> None:
    """At every file that is written, and at every one that is moved into place."""
    for step in range(6):
        path = Path(folder) / str(step) / "model.safetensors"
        path.parent.mkdir()
        qtorch.save_quantized(constant(0.0, 4, 3), path, max_shard_size=1)
        if not (child := os.fork()):
            _die_at(*((qtorch.checkpoint.save_load, "write_file", step) if step < 3 else (os, "replace", step - 3)))
            qtorch.save_quantized(constant(1.0, 4, 3), path, max_shard_size=1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    print("started", flush=True)


def _die_at(owner: Any, name: str, calls: int) -> None:
    original = getattr(owner, name)

    def dying(*arguments: Any) -> Any:
        nonlocal calls
        if not calls:
            if name == "write_file":
                Path(arguments[0]).write_bytes(b"half a fi")
            os.kill(os.getpid(), signal.SIGKILL)
        calls -= 1
        return original(*arguments)

    setattr(owner, name, dying)


def save_within(path: str, shard_size: str, limits: str) -> None:
    """In files of at most so many bytes, one limit after another; what the error says."""
    print("started", flush=True)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in map(int, limits.split(",")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            qtorch.save_quantized(quantized(), path, max_shard_size=int(shard_size))
        except OSError as error:
            print(error.errno, str(error).partition(":")[0], flush=True)
        else:
            print("saved", flush=True)


# --- commands ---
def attempt(arguments: list[str], seconds: float | None, largest: int | None) -> str:
    """Run the command in a fork of this process, which has imported everything."""
    child = os.fork()
    if child == 0:
        if largest is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
        try:
            status = qtorch.cli.main(arguments)
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "killed" if code == -signal.SIGKILL else str(code)


def command(how: str, seed: str, times: str, dst: str, *arguments: str) -> None:
    """A command that is "killed" at random moments, or whose disk is "full"; then it is left to finish.

    Prints, after each attempt, its status ("killed" if it was) and whether `dst` exists.
    """
    import transformers

    assert transformers.AutoModelForCausalLM
    assert transformers.AutoTokenizer
    print("started", flush=True)
    chance, path, words = random.Random(seed), Path(dst), list(arguments)
    begin = time.monotonic()
    assert attempt(words, None, None) == "0"
    whole = time.monotonic() - begin
    sizes = [file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path])]
    done = 0
    while done < int(times):
        if path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if how == "killed":
            said = attempt(words, chance.uniform(0, whole), None)
        else:
            said = attempt(words, None, chance.randrange(max(sizes)))
        done += said != "0"
        print(said, path.exists(), flush=True)
    if not path.exists():
        assert attempt(words, None, None) == "0"


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
