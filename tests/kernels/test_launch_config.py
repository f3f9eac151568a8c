"""Launch configurations: what is shipped, the nearest match, tables of one's own, tuning."""

import json

import pytest
import torch

from qtorch.kernels import LaunchConfig, autotune, record_kernels
from qtorch.kernels.cuda import launch_config
from qtorch.kernels.cuda.launch_config import SHIPPED, Table, find, forced, launch

OF_EXPERTS = {"experts_weight_mm", "experts_int8_mm"}
OPS = {"int8_scaled_mm", "intx_weight_mm", "int8_grouped_mm", "tile_scaled_mm"} | OF_EXPERTS


@pytest.fixture(autouse=True)
def fresh_tables():
    """Tables are read once a process."""
    launch_config.tables.cache_clear()
    launch_config._nearest.cache_clear()
    yield
    launch_config.tables.cache_clear()
    launch_config._nearest.cache_clear()


def table(**configs):
    """{op: {rows: fields}} as a table."""
    entries = [
        {"op": op, "dtype": "int8", "m": m, "n": 64, "k": 64, **fields}
        for op, by_rows in configs.items()
        for m, fields in by_rows.items()
    ]
    return Table({"gpu": "", "capability": [], "multiprocessors": 0, "measured": None, "configs": entries}, "mine")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables(path, tmp_path):
    """Every op has entries for few rows and many; files are what `write` writes; undated values are reasoned."""
    shipped = Table.read(path)
    # Products of experts are not measured on any GPU yet: the default serves all.
    ops = OPS if path.stem == "default" else OPS - OF_EXPERTS
    assert {op for op, *_ in shipped.entries} == ops
    for op in ops:
        rows = [m for name, _, (m, _, _) in shipped.entries if name == op]
        assert min(rows) == 1
        assert max(rows) >= 4096
    for config in shipped.entries.values():
        sizes = config.block_m, config.block_n, config.block_k, config.num_warps
        assert all(size & (size - 1) == 0 for size in sizes)
    shipped.write(tmp_path / path.name)
    assert (tmp_path / path.name).read_text() == path.read_text()
    assert "measured" in json.loads(path.read_text())


def test_the_nearest_entry():
    mine = table(f={1: {"block_m": 16}, 64: {"block_m": 64}})
    assert mine.nearest("f", "int8", (4, 64, 64)).block_m == 16
    assert mine.nearest("f", "int8", (32, 64, 64)).block_m == 64
    assert mine.nearest("f", "int4", (1, 4096, 64)).block_m == 16, "of another dtype rather than none"
    assert mine.nearest("g", "int8", (1, 64, 64)) is None


def test_rows_are_rounded_up():
    assert find("int8_scaled_mm", "int8", (3000, 4096, 4096)) == find("int8_scaled_mm", "int8", (4096, 4096, 4096))
    assert find("no such op", "int8", (1, 1, 1)) == LaunchConfig()


def test_the_table_of_a_gpu(monkeypatch):
    """Its own by name, else that of the nearest size with the same capability, else the default."""

    def on(name, major, minor, multiprocessors):
        launch_config.tables.cache_clear()
        properties = type("P", (), {"name": name, "major": major, "minor": minor,
                                    "multi_processor_count": multiprocessors})  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
        return [t.name for t in launch_config.tables()]

    assert on("NVIDIA H200", 9, 0, 132) == ["h200", "default"]
    assert on("NVIDIA H100 PCIe", 9, 0, 114) == ["h200", "default"]
    assert on("NVIDIA A100", 8, 0, 108) == ["default"]


def test_a_table_of_ones_own_comes_first(monkeypatch, tmp_path):
    mine = table(int8_scaled_mm={1: {"block_m": 32}})
    mine.write(tmp_path / "mine.json")
    monkeypatch.setenv("QTORCH_CONFIGS", str(tmp_path / "mine.json"))
    assert find("int8_scaled_mm", "int8", (4096, 4096, 4096)).block_m == 32
    assert find("tile_scaled_mm", "int8", (4096, 4096, 4096)) != LaunchConfig()


def test_forced():
    with forced(LaunchConfig(64), num_warps=8):
        assert find("f", "int8", (1, 1, 1)) == LaunchConfig(64, num_warps=8)
    assert find("f", "int8", (1, 1, 1)) == LaunchConfig()


def test_nothing_is_timed_unasked():
    ran = []
    with record_kernels() as recorded:
        launch("f", "int8", (1, 1, 1), ran.append, [LaunchConfig(64)], torch.device("cuda"))
    assert ran == [LaunchConfig()]
    assert recorded == ["triton.f"]


def test_autotune(monkeypatch, tmp_path):
    """Each shape once, at its first call; the result is used afterwards, and saved where asked."""
    timed = []

    def fastest(run, candidates):
        timed.append(list(candidates))
        return timed[-1][-1]

    monkeypatch.setattr(launch_config, "_fastest", fastest)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ran, best = [], LaunchConfig(64, path="quick")
    call = lambda m, device="cuda": launch("f", "int8", (m, 8, 8), ran.append, [best], torch.device(device))  # noqa: E731
    with autotune(tmp_path / "tuned.json") as found:
        call(5)
        call(8)
        call(100, "cpu")
    assert timed == [[LaunchConfig(), best]]
    assert ran == [best, best, LaunchConfig()]
    assert found == {("f", "int8", (8, 8, 8)): best}
    call(7)
    assert ran[-1] == best
    saved = Table.read(tmp_path / "tuned.json")
    assert saved.entries == found
    with autotune(tmp_path / "tuned.json"):
        call(1)
    assert len(Table.read(tmp_path / "tuned.json").entries) == 2


def test_candidates_that_do_not_fit_drop_out(monkeypatch):
    pytest.importorskip("triton")
    import triton.testing
    from triton.runtime.errors import OutOfResources

    times = {16: 3.0, 32: 1.0, 64: 2.0}

    def run(config):
        if config.block_m == 128:
            raise OutOfResources(1 << 20, 1 << 17, "shared memory")
        run.last = config.block_m

    monkeypatch.setattr(triton.testing, "do_bench", lambda function, **_: (function(), times[run.last])[1])
    candidates = [LaunchConfig(m) for m in (16, 32, 64, 128)]
    assert launch_config._fastest(run, candidates) == LaunchConfig(32)
    with pytest.raises(RuntimeError, match="no launch configuration runs"):
        launch_config._fastest(run, candidates[3:])
