"""Damaged files of every reader: refused by an error that names the file, in bounded time and memory, or read.

QTORCH_FUZZ is the number of seeded cases of all readers; a failure names the command that repeats it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qtorch.checkpoint.save_folder import SAVE_FORMATS
from qtorch.checkpoint.sources import SOURCES, QtorchSource
from tests.attack import readers, workers

pytest.importorskip("gguf")
pytest.importorskip("bitsandbytes")

COUNT = max(1, int(os.environ.get("QTORCH_FUZZ", "1000")) // 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", readers.READERS)
def test_every_seed(name: str) -> None:
    found = workers.failures(f"tests.attack.readers:{name}", 0, COUNT)
    assert not found, f"{len(found)} of {COUNT}:\n" + "\n".join(found)


def test_every_registered_format_is_among_them(tmp_path: Path) -> None:
    """That of `save_quantized` is attacked by `checkpoints`."""
    seen = {QtorchSource}
    for name in [*readers.FOLDERS, "gguf"]:
        readers.READERS[name].make(tmp_path / name)
        path = tmp_path / name / ("model.gguf" if name == "gguf" else "")
        seen.add(next(kind for kind in SOURCES if kind.recognizes(path)))
    assert seen == set(SOURCES)
    assert {f"unfinished {name}" for name in ("qtorch", *SAVE_FORMATS)} <= readers.READERS.keys()


def test_damage_depends_on_the_seed_alone(tmp_path: Path) -> None:
    """And it does damage."""
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
