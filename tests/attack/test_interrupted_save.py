"""Saves that are killed or fail: the old checkpoint whole or the new one, and the next save removes what is left."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import qtorch
from qtorch import checkpoint, load_quantized, save_quantized
from tests.checkpoint_model import SMALL, Model, assert_same, files, quantized

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(qtorch.__file__).parent.parent)}

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# --- killed ---

KILLED_AT = """
import os, signal, sys, torch
from pathlib import Path
from torch import nn
import qtorch
import qtorch.checkpoint.save
from qtorch import checkpoint

def model(value):
    return nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)]).requires_grad_(False).apply(
        lambda m: m.weight.fill_(value) if isinstance(m, nn.Linear) else None)

def kill_after(function, calls):
    def killing(*args):
        nonlocal calls
        if not calls:
            if function is checkpoint.save.write_file.__wrapped__:
                Path(args[0]).write_bytes(b"half a fi")
            os.kill(os.getpid(), signal.SIGKILL)
        calls -= 1
        return function(*args)
    killing.__wrapped__ = function
    return killing

for step in range(6):
    folder = Path(sys.argv[1]) / str(step)
    folder.mkdir()
    qtorch.save_quantized(model(0.0), folder / "model.safetensors", max_shard_size=1)
    if not (child := os.fork()):
        checkpoint.save.write_file = kill_after(checkpoint.save.write_file, step if step < 3 else 99)
        os.replace = kill_after(os.replace, step - 3 if step >= 3 else 99)
        qtorch.save_quantized(model(1.0), folder / "model.safetensors", max_shard_size=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(script, *arguments), check=True, env=ENVIRONMENT, capture_output=True, text=True)


def command(script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", script, *map(str, arguments)]


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])


@pytest.mark.slow
@needs_fork
def test_killed_at_every_step(tmp_path: Path) -> None:
    """At every file that is written and every one that is moved into place."""
    run(KILLED_AT, tmp_path)
    for step in range(6):
        target = tmp_path / str(step) / "model.safetensors"
        model = load_quantized(layers(), target)
        assert all(bool((layer.weight == 0).all()) for layer in model)
        assert len(files(target.parent)) > 3
        save_quantized(model, target, max_shard_size=1)
        assert len(files(target.parent)) == 3


KILLS = int(os.environ.get("QTORCH_KILLS", "50"))

SAVES_FOREVER = """
import os, signal, sys, torch
import qtorch
from torch import nn

path, shard_size = sys.argv[1], int(sys.argv[2])
models = {}
for value in (0, 1):
    layers = [nn.Linear(96, 96, bias=False) for _ in range(6)]
    for layer in layers:
        layer.weight.data.fill_(value)
    models[value] = nn.Sequential(*layers)
    qtorch.quantize_(models[value], {"[0-2]": qtorch.int8_weight_only()})
qtorch.save_quantized(models[0], path, max_shard_size=shard_size)
for line in sys.stdin:
    # One save, which the parent of this process kills at a time of its own.
    if not (child := os.fork()):
        qtorch.save_quantized(models[int(line)], path, max_shard_size=shard_size)
        os._exit(0)
    print(child, flush=True)
    status = os.waitpid(child, 0)[1]
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("shard_size", [1, 2**30], ids=["shards", "one file"])
def test_killed_at_any_time(shard_size: int, path: Path) -> None:
    """SIGKILL after a random time, from at once to what a save takes; `QTORCH_KILLS` is the number of saves."""
    rng = random.Random(shard_size)
    killed = 0
    longest = 0.004
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": ENVIRONMENT}
    with subprocess.Popen(command(SAVES_FOREVER, path, shard_size), **pipes) as saver:  # type: ignore[call-overload]
        value = 0
        for _ in range(KILLS):
            saver.stdin.write(f"{1 - value}\n")
            saver.stdin.flush()
            child = int(saver.stdout.readline())
            with contextlib.suppress(subprocess.TimeoutExpired):
                saver.wait(rng.uniform(0, longest))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            finished = int(saver.stdout.readline()) == 0
            killed += not finished
            # Halve or grow what is waited for, so that kills fall within the save whatever the machine.
            longest = longest * 0.8 if finished else longest * 1.15
            found = value_at(path)
            assert found == 1 - value if finished else found in (0, 1)
            value = found
        saver.stdin.close()
    assert killed > KILLS // 10
    save_quantized(one_of_ours(), path)
    assert files(path.parent) == ["model.safetensors"]


def one_of_ours() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(6)])


def value_at(path: Path) -> int:
    """What all the weights of the checkpoint are."""
    model = load_quantized(one_of_ours(), path)
    (value,) = {float(value) for layer in model for value in layer.weight.dequantize().unique()}
    return int(value)


# --- errors ---


@pytest.mark.parametrize("step", ["write_file", "os.replace", "os.fsync"])
@pytest.mark.parametrize("times", [0, 1, 2])
def test_failure_while_saving(step: str, times: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = quantized()
    save_quantized(old, path, max_shard_size=SMALL)
    owner, name = (checkpoint.save.os, step.partition(".")[2]) if "." in step else (checkpoint.save, step)
    function, calls = getattr(owner, name), []

    def failing(*args: object) -> object:
        calls.append(args)
        if len(calls) > times:
            raise InterruptedError
        return function(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(InterruptedError):
            save_quantized(quantized(), path, max_shard_size=SMALL)
    assert_same(load_quantized(Model(), path), old)
    assert not list(path.parent.glob(".*"))
    save_quantized(old, path)
    assert files(path.parent) == ["model.safetensors"]


# --- a disk that is full ---

LIMITED = """
import resource, signal, sys, qtorch
from tests.checkpoint_model import quantized

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in map(int, sys.argv[2].split(",")):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        qtorch.save_quantized(quantized(), sys.argv[1], max_shard_size=int(sys.argv[3]))
    except OSError as error:
        print(error.errno, str(error).partition(":")[0], flush=True)
    else:
        print("saved", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
@pytest.mark.parametrize("shard_size", [1, SMALL, 2**30])
def test_files_cannot_grow(shard_size: int, path: Path) -> None:
    old = quantized()
    save_quantized(old, path, max_shard_size=shard_size)
    before = files(path.parent)
    limits = random.Random(0).sample(range(2000), 12)
    said = run(LIMITED, path, ",".join(map(str, limits)), shard_size).stdout.split("\n")[:-1]
    assert said == [f"{errno.EFBIG} [Errno {errno.EFBIG}] save_quantized"] * len(limits)
    assert_same(load_quantized(Model(), path), old)
    assert files(path.parent) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_device_that_is_full() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.save.write_file(Path("/dev/full"), {"x": torch.zeros(1)}, {})
