"""Saves that are killed or fail, and loads beside a save: the old checkpoint whole or the new one, never a mixture.

QTORCH_KILLS is the number of saves that are killed, QTORCH_LOADS that of loads.
"""

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

import qtorch
from qtorch import checkpoint, load_quantized, save_quantized
from tests.attack import calls
from tests.checkpoint_model import SMALL, Model, assert_same, files, quantized

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
KILLS = int(os.environ.get("QTORCH_KILLS", "50"))
LOADS = int(os.environ.get("QTORCH_LOADS", "150"))


# --- killed ---
@pytest.mark.slow
@needs_fork
def test_killed_at_every_step(tmp_path: Path) -> None:
    """At every file that is written and every one that is moved into place."""
    process = calls.start("save_and_die", tmp_path)
    process.communicate(timeout=300)
    assert process.returncode == 0
    for step in range(6):
        target = tmp_path / str(step) / "model.safetensors"
        assert calls.value_in(target, 4, 3) == 0
        assert len(files(target.parent)) > 3
        save_quantized(calls.constant(0.0, 4, 3), target, max_shard_size=1)
        assert len(files(target.parent)) == 3


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("shard_size", [1, 2**30], ids=["shards", "one file"])
def test_killed_at_any_time(shard_size: int, path: Path) -> None:
    """SIGKILL after a random time, from at once to what a save takes."""
    rng = random.Random(shard_size)
    killed, longest, value = 0, 0.004, 0
    with calls.start("save_when_asked", path, shard_size) as saver:
        assert saver.stdin is not None
        assert saver.stdout is not None
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
            found = int(calls.value_in(path))
            assert found == 1 - value if finished else found in (0, 1)
            value = found
        saver.stdin.close()
    assert killed > KILLS // 10
    save_quantized(calls.constant(0.0), path)
    assert files(path.parent) == ["model.safetensors"]


# --- loaded meanwhile ---
@pytest.mark.slow
@pytest.mark.parametrize("shard_size", [1, 10_000, 2**30])
@pytest.mark.parametrize("mmap", [True, False])
def test_never_a_mixture(shard_size: int, mmap: bool, path: Path) -> None:
    seen: set[float] = set()
    with calls.start("save_forever", path, shard_size) as saver:
        try:
            for attempt in range(100 * LOADS):
                seen.add(calls.value_in(path, mmap=mmap))
                if attempt >= LOADS and len(seen) == 2:
                    break
        finally:
            saver.kill()
    assert seen == {0.0, 1.0}


def test_a_root_that_is_replaced_between_its_shards(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save comes when the root was opened and its shards were not: they are gone, the path has a new checkpoint."""
    old, new = (torch.nn.Linear(8, 8) for _ in range(2))
    save_quantized(old, path, max_shard_size=1)
    opened = []
    parse = qtorch.checkpoint.header.Header.parse

    def saves_first(metadata: dict[str, str]) -> object:
        if not opened:
            save_quantized(new, path, max_shard_size=1)
        opened.append(metadata)
        return parse(metadata)

    monkeypatch.setattr(qtorch.checkpoint.header.Header, "parse", saves_first)
    model = load_quantized(torch.nn.Linear(8, 8), path)
    assert len(opened) == 2
    assert torch.equal(model.weight, new.weight)
    assert torch.equal(model.bias, new.bias)


# --- errors ---
@pytest.mark.parametrize("step", ["write_file", "os.replace", "os.fsync"])
@pytest.mark.parametrize("times", [0, 1, 2])
def test_failure_while_saving(step: str, times: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = quantized()
    save_quantized(old, path, max_shard_size=SMALL)
    owner, name = (checkpoint.save_load.os, step.partition(".")[2]) if "." in step else (checkpoint.save_load, step)
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
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
@pytest.mark.parametrize("shard_size", [1, SMALL, 2**30])
def test_files_cannot_grow(shard_size: int, path: Path) -> None:
    old = quantized()
    save_quantized(old, path, max_shard_size=shard_size)
    before = files(path.parent)
    limits = random.Random(0).sample(range(2000), 12)
    said, _ = calls.start("save_within", path, shard_size, ",".join(map(str, limits))).communicate(timeout=300)
    assert said.splitlines() == [f"{errno.EFBIG} [Errno {errno.EFBIG}] save_quantized"] * len(limits)
    assert_same(load_quantized(Model(), path), old)
    assert files(path.parent) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_device_that_is_full() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.save_load.write_file(Path("/dev/full"), {"x": torch.zeros(1)}, {})
