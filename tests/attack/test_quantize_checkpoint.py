"""quantize_checkpoint and calibration: bounded memory, and a process that is killed is continued by the next.

QTORCH_CHECKPOINT_MB=2048 and QTORCH_KILLS=20 make the checkpoint and the number of kills larger.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.attack import calls
from tests.cli.tiny import WORDS, save_llama
from tests.float_checkpoints import save_shards

MEGABYTES = int(os.environ.get("QTORCH_CHECKPOINT_MB", "256"))
KILLS = int(os.environ.get("QTORCH_KILLS", "3"))

pytestmark = pytest.mark.slow


def random_folder(folder: Path, megabytes: int, largest: int) -> Path:
    """A checkpoint of this size in bf16, in weights of `largest` bytes and smaller tensors."""
    columns = 1024
    rows = largest // (2 * columns)
    count = megabytes * 2**20 // largest
    torch.manual_seed(0)
    tensors = {f"layers.{i}.proj.weight": torch.randn(rows, columns, dtype=torch.bfloat16) for i in range(count)}
    tensors |= {f"layers.{i}.norm.weight": torch.randn(33, dtype=torch.bfloat16) for i in range(count)}
    return save_shards(tensors, folder, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("format", ["qtorch", "transformers"])
def test_memory_is_that_of_one_tensor(format: str, tmp_path: Path) -> None:
    largest = 32 * 2**20
    source = random_folder(tmp_path / "float", MEGABYTES, largest)
    dst = tmp_path / ("q.safetensors" if format == "qtorch" else "q")
    grown = calls.growth("quantize", source, dst, format, 1 << 40)
    print(f"{MEGABYTES} MiB in weights of {largest >> 20} MiB: memory grew by {grown / 2**20:.0f} MiB")
    # The tensor in bf16, twice while it is read; a byte for each of its codes, and half a byte packed, twice; slices,
    # the header, and what the allocator keeps. It does not depend on the size of the checkpoint.
    assert largest / 2 < grown < 4 * largest + 64 * 2**20


HIDDEN, INNER = 1024, 2048
BLOCK = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
"""Bytes of the weights of a block, in fp32."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_calibration_is_that_of_a_block(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    grown = {}
    for blocks in (2, 8):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=256, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=blocks, num_attention_heads=8
        )
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / f"{blocks}")
        grown[blocks] = calls.growth("calibrate", tmp_path / f"{blocks}", tmp_path / f"q{blocks}")
    print({blocks: f"{size / 2**20:.0f} MiB" for blocks, size in grown.items()}, f"a block: {BLOCK / 2**20:.0f} MiB")
    # Six more blocks are 240 MiB; what is added is the journal, and what the allocator keeps.
    assert grown[8] < grown[2] + BLOCK
    # Two blocks, the statistics and the rounding of `down`, and the codes of a block.
    assert grown[8] < 2 * BLOCK + 4 * (8 * INNER**2 + 8 * HIDDEN * INNER) + BLOCK // 4 + 64 * 2**20


@pytest.mark.parametrize("what", ["qtorch", "compressed-tensors", "resume"])
def test_killed_and_continued(what: str, tmp_path: Path) -> None:
    """A checkpoint that is quantized in these formats, or a model that is calibrated with a folder to continue from."""
    name = "q" if what == "compressed-tensors" else "q.safetensors"
    chance = random.Random(0)
    source = None if what == "resume" else random_folder(tmp_path / "float", MEGABYTES // 4, 2**20)

    def started(folder: Path) -> subprocess.Popen[str]:
        arguments = (
            ("resume", folder / name) if what == "resume" else ("quantize", source, folder / name, what, 1 << 23)
        )
        return calls.start(*arguments)

    (tmp_path / "wanted").mkdir()
    begin = time.monotonic()
    process = started(tmp_path / "wanted")
    process.communicate(timeout=900)
    seconds = time.monotonic() - begin
    assert process.returncode == 0
    wanted = files(tmp_path / "wanted")

    killed = 0
    folder = tmp_path / "killed"
    for _ in range(20 * KILLS):
        if killed >= KILLS:
            break
        folder.mkdir()
        for _attempt in range(50):
            process = started(folder)
            try:
                process.communicate(timeout=chance.uniform(0.0, 0.6 * seconds) + 0.01)
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                killed += 1
                # What is there is complete, or not there.
                complete = (folder / name).exists()
                assert not complete or files(folder).keys() >= wanted.keys()
                if complete and not (folder / f".{name}.partial").exists():
                    break
        assert files(folder) == wanted
        shutil.rmtree(folder)
    print(f"killed {killed} times")
    assert killed >= KILLS


COMMANDS = {
    "quantize": ("quantize", "{llama}", "{dst}", "--recipe", "int4_weight_only", "--set", "group_size=32"),
    "one file": ("quantize", "{llama}", "{dst}.safetensors", "--recipe", "int8_weight_only", "--format", "qtorch"),
    "convert": ("convert", "{llama}", "{dst}", "--format", "transformers"),
    "calibrate": (
        *("quantize", "{llama}", "{dst}", "--recipe", "int4_weight_only", "--set", "group_size=32"),
        *("--calibrate", "{text}", "--method", "gptq", "--calibrate-length", "32", "--calibrate-tokens", "64"),
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of a process")
@pytest.mark.parametrize("how", ["killed", "full"])
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_write_all_or_nothing(name: str, how: str, tmp_path: Path) -> None:
    """Killed, or with files that may not grow: what is written is complete, or not there, and is what it should be."""
    pytest.importorskip("transformers")
    from qtorch.cli import main

    llama = save_llama(tmp_path / "llama")
    (tmp_path / "text.txt").write_text(" ".join(WORDS))
    found = {}
    for kind in ("wanted", how):
        (tmp_path / kind).mkdir()
        places = {"llama": llama, "dst": tmp_path / kind / "q", "text": tmp_path / "text.txt"}
        command = [word.format(**places) for word in COMMANDS[name]]
        if kind == "wanted":
            assert main(command) == 0
        else:
            process = calls.start("command", how, 0, KILLS, command[2], *command)
            out, err = process.communicate(timeout=900)
            assert process.returncode == 0, err[-3000:]
            said = [line.split() for line in out.splitlines()]
            assert sum(status != "0" for status, _ in said) >= KILLS
            if how == "full":
                assert all(exists == str(status == "0") for status, exists in said)
                assert "Traceback" not in err
        found[kind] = files(tmp_path / kind)
    assert found[how] == found["wanted"]


def files(folder: Path) -> dict[str, bytes]:
    """All but those of a folder to continue from."""
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {str(name): path.read_bytes() for name, path in found.items() if "q.resume" not in name.parts}
