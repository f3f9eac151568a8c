"""Measuring which way is fastest: a file that is then used, and the earlier name."""

import json

import pytest
import torch

import qtorch
from qtorch.kernels.cpu import compiled_library, measure_ways, ways


@pytest.mark.skipif(compiled_library.library() is None, reason="nothing is compiled")
def test_a_table_is_measured_saved_and_used(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_ways, "SIZES", {"small": 256, "large": 1152})
    monkeypatch.setattr(measure_ways, "ROWS", {"small": (1, 40), "large": (1,)})
    monkeypatch.setattr(measure_ways, "COPIES", 1)
    monkeypatch.setattr(measure_ways, "ROUNDS", 1)
    monkeypatch.setattr(ways, "_choices", {})
    table = qtorch.kernels.measure_cpu_ways(tmp_path / "ways.json")
    name = compiled_library.library().instruction_set
    assert ways._choices == {name: {key: [list(step) for step in steps] for key, steps in table.items()}}
    assert json.loads((tmp_path / "ways.json").read_text()) == ways._choices
    kinds = (
        "int8",
        *(f"{dtype}{copied}" for dtype in ("float32", "bfloat16", "float16") for copied in ("", " copied")),
    )
    assert len(table) == 2 * 2 * 2 * len(kinds) + len(["small", "large"])  # of short groups
    assert all(steps[-1][0] is None for steps in table.values())
    ways._find.cache_clear()
    key = ways.key_of(torch.float32, False, False, 256**2)
    assert ways.choose(name, key, 1) == table[key][0][1]
    ways._find.cache_clear()


def test_the_earlier_name():
    assert qtorch.kernels.calibrate_cpu is qtorch.kernels.measure_cpu_ways
