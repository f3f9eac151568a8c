"""Checkpoints and pickles that were damaged, and tensors whose memory was moved: refused by a clear error, or sound.

QTORCH_FUZZ is the number of seeded cases of a kind; a failure names the command that repeats it.
"""

import importlib.util
import io
import itertools
import os
import pickle
import pickletools
import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

import qtorch
from qtorch.checkpoint import save_folder, sources
from tests import every_recipe
from tests.attack import checkpoints, moved_memory, pickles, readers, workers
from tests.attack.battery import battery
from tests.attack.damage import Damage
from tests.attack.sources import NAMES, source
from tests.movement.holding import through_file

COUNT = int(os.environ.get("QTORCH_FUZZ", "1000"))
COUNTS = {"pickles": COUNT, "checkpoints": COUNT, "moved_memory": len(moved_memory.CASES)}
# Half a kind is a test, so that two processes share it; the quick part takes every change of the first weights.
SEEDS = [("pickles", 0, 100), ("moved_memory", 0, 100)]
HALVES = [(kind, count * half // 2, count * (half + 1) // 2) for kind, count in COUNTS.items() for half in (0, 1)]


@pytest.mark.parametrize(
    ("kind", "first", "stop"), SEEDS + [pytest.param(*half, marks=pytest.mark.slow) for half in HALVES]
)
def test_every_seed(kind: str, first: int, stop: int) -> None:
    """Clear errors, or what works, with the right numbers; no crash, no half load, no memory of others."""
    found = workers.failures(f"tests.attack.{kind}", first, stop - first)
    assert not found, f"{len(found)} of {stop - first}:\n" + "\n".join(found[:40])


def test_the_cases_are_there_and_depend_on_their_seed_alone() -> None:
    assert len(moved_memory.CASES) > 1000
    assert {"qdata", "scale", "zero_point"} <= {case.tensor for case in moved_memory.CASES}
    assert [pickles.damaged(seed)[0] for seed in range(20)] == [pickles.damaged(seed)[0] for seed in range(20)]
    words = " ".join(pickles.damaged(seed)[0] for seed in range(400))
    assert all(w in words for w in ("scheme: shape", "state", "type name", "tensors: missing", "not_a_tensor", "deep"))
    assert len(set(pickles.DAMAGES)) == 10


# --- what is not damaged is sound, so that a failure above is one of the damage ---
@pytest.mark.parametrize("name", every_recipe.NAMES)
@pytest.mark.parametrize("options", [{}, pytest.param({"mmap": True}, marks=pytest.mark.slow)], ids=str)
def test_a_checkpoint_that_is_not_damaged(name: str, options: dict[str, bool]) -> None:
    for shard_size in checkpoints.SHARD_SIZES:
        path = checkpoints.saved(name, shard_size) / checkpoints.NAME
        assert checkpoints.attack(checkpoints.meta(), path, options, checkpoints.right(name)) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_pickle_that_is_not_damaged(name: str) -> None:
    assert battery(through_file(source(name))) is None


@pytest.mark.parametrize("damage", dict.fromkeys(checkpoints.DAMAGES), ids=lambda damage: damage.__name__)
def test_damage_to_a_checkpoint_depends_on_the_seed_alone(damage: Damage, tmp_path: Path) -> None:
    """And it does damage."""
    source = checkpoints.saved("int4_weight_only", 1)
    done = []
    for attempt in range(2):
        for seed in range(8):
            folder = tmp_path / f"{attempt}-{seed}"
            shutil.copytree(source, folder)
            what, _ = damage(folder, random.Random(seed))
            done.append((seed, what, {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}))
    assert done[:8] == done[8:]
    whole = {path.name: path.read_bytes() for path in source.iterdir()}
    assert sum(files != whole for _, _, files in done) > 8


def test_a_dying_process_is_a_failure() -> None:
    """The attack itself: a case that kills its process is found, and the cases after it run."""
    found = workers.failures("tests.attack.dying", 0, 5)
    assert found == [
        "python -m tests.attack.workers 'tests.attack.dying' 1 1: the process died: SIGSEGV",
        "python -m tests.attack.workers 'tests.attack.dying' 3 1: wrong",
        "python -m tests.attack.workers 'tests.attack.dying' 4 1: ZeroDivisionError: division by zero",
        "python -m tests.attack.workers 'tests.attack.dying' 4 1: the process died: exit status 1",
    ]


# --- files of every other reader ---
needs_packages = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("gguf", "bitsandbytes"))), reason="needs gguf and bitsandbytes"
)


@pytest.mark.slow
@needs_packages
@pytest.mark.parametrize("name", readers.READERS)
def test_every_seed_of_a_reader(name: str) -> None:
    """Refused by an error that names the file, in bounded time and memory, or read."""
    found = workers.failures(f"tests.attack.readers:{name}", 0, max(1, COUNT // 50))
    assert not found, "\n".join(found)


@needs_packages
def test_readers_are_registered_and_damage_depends_on_the_seed(tmp_path: Path) -> None:
    """That of `save_quantized` is attacked by `checkpoints`."""
    seen = {sources.QtorchSource}
    for name in [*readers.FOLDERS, "gguf"]:
        readers.READERS[name].make(tmp_path / name)
        path = tmp_path / name / ("model.gguf" if name == "gguf" else "")
        seen.add(next(kind for kind in sources.SOURCES if kind.recognizes(path)))
    assert seen == set(sources.SOURCES)
    assert {f"unfinished {name}" for name in ("qtorch", *save_folder.SAVE_FORMATS)} <= readers.READERS.keys()
    # And it does damage.
    done = []
    for attempt in range(2):
        for seed in range(12):
            folder = tmp_path / f"{attempt}-{seed}" / readers.ROOT
            folder.mkdir(parents=True)
            readers.allocation(folder)
            what, _ = readers.damaged("allocation", seed, folder)
            done.append((seed, what, readers.contents(folder)))
    assert done[:12] == done[12:]
    readers.allocation(tmp_path / "whole")
    assert sum(files != readers.contents(tmp_path / "whole") for _, _, files in done) > 12


# --- pickles that change what was checked ---
def test_the_state_of_a_parameter() -> None:
    """torch's own function of this name may be in a pickle as well."""
    original = qtorch.int8_weight_only().apply(torch.randn(256, 256))
    with_state = torch._utils._rebuild_parameter_with_state
    arguments = (original, False, None, {"qdata": torch.zeros(1, 256, dtype=torch.int8)})
    try:
        loaded = through_file(pickles.Reduced(with_state, arguments))
    except (ValueError, TypeError, pickle.UnpicklingError):
        return
    for rows in (1, 3, 3):
        with pytest.raises((ValueError, RuntimeError), match=r"qdata|codes"):
            torch.nn.functional.linear(torch.randn(rows, 256), loaded)


@pytest.mark.parametrize("inner", ["qdata", "scale"])
def test_an_inner_tensor_that_a_pickle_changes_after_the_check(inner: str) -> None:
    """BUILD on a plain tensor is `set_`: the file itself may shrink a tensor that was checked before."""
    original = qtorch.int8_weight_only().apply(torch.randn(256, 256))
    file = io.BytesIO()
    torch.save([original.qdata, original.scale, original], file)
    loaded = torch.load(io.BytesIO(_shrunk(file.getvalue(), 0 if inner == "qdata" else 1)), weights_only=True)
    assert getattr(loaded[2], inner).shape == (1, 1)
    for rows in (1, 3, 64, 64):
        with pytest.raises((ValueError, RuntimeError), match=inner if inner == "scale" else r"qdata|codes"):
            torch.nn.functional.linear(torch.randn(rows, 256), loaded[2])
    with pytest.raises((ValueError, RuntimeError)):
        torch.nn.functional.embedding(torch.tensor([255]), loaded[2])


def _shrunk(file: bytes, index: int) -> bytes:
    """The file with opcodes at its end that call `set_` on tensor `index` of those it holds: one element is left."""
    source, target = zipfile.ZipFile(io.BytesIO(file)), io.BytesIO()
    with zipfile.ZipFile(target, "w") as new:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename.endswith("/data.pkl"):
                data = data[:-1] + _set_one_element(data, index) + b"."
            new.writestr(entry, data)
    return target.getvalue()


def _set_one_element(data: bytes, index: int) -> bytes:
    """Opcodes: get the tensor, build it with (its storage, 0, (1, 1), (1, 1)), append it to the list that is on top."""
    operations = list(pickletools.genops(data))
    following = list(itertools.pairwise(operations))
    # What torch remembers: the name of a storage, before it is fetched; a tensor, after an OrderedDict of its hooks.
    storages = [before[1] for before, (operation, *_) in following if operation.name == "BINPERSID"]
    made = [after[1] for (operation, *_), after in following if operation.name == "REDUCE"]
    get = (b"h" + bytes([made[2 * index + 1]]), b"h" + bytes([storages[index]]))
    pair = b"K\x01K\x01\x86"
    return get[0] + b"(" + get[1] + b"QK\x00" + pair + pair + b"tb" + b"a"
