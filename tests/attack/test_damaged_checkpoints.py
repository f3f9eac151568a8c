"""Checkpoints that were damaged: `load_quantized` refuses them and leaves the model, or what it loads works.

QTORCH_FUZZ is the number of seeded cases; a failure names the command that repeats it.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from tests import every_recipe
from tests.attack import checkpoints, workers
from tests.attack.damage import Damage

COUNT = int(os.environ.get("QTORCH_FUZZ", "1000"))
PARTS = 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_seed(part: int) -> None:
    """Clear errors, or models that run, the right one where a checksum tells; no crash, no half load."""
    bounds = [COUNT * i // PARTS for i in range(PARTS + 1)]
    found = workers.failures("tests.attack.checkpoints", bounds[part], bounds[part + 1] - bounds[part])
    assert not found, f"{len(found)} of {bounds[part + 1] - bounds[part]}:\n" + "\n".join(found[:40])


@pytest.mark.parametrize("name", every_recipe.NAMES)
@pytest.mark.parametrize("options", [{}, {"mmap": True}], ids=str)
def test_what_is_not_damaged_is_sound(name: str, options: dict[str, bool]) -> None:
    """So that a failure above is one of the damage."""
    for shard_size in checkpoints.SHARD_SIZES:
        path = checkpoints.saved(name, shard_size) / checkpoints.NAME
        assert checkpoints.attack(checkpoints.meta(), path, options, checkpoints.right(name)) is None


@pytest.mark.parametrize("damage", dict.fromkeys(checkpoints.DAMAGES), ids=lambda damage: damage.__name__)
def test_damage_depends_on_the_seed_alone(damage: Damage, tmp_path: Path) -> None:
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
