"""benchmarks/bench_cpu_model.py in its small form: it runs, saves, writes its table into the page, and is drawn."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench_cpu_model, common
from qtorch.kernels import record_kernels


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where everything is written instead of the repository."""
    page = tmp_path / "results.md"
    page.write_text("before\n<!-- cpu_model: begin -->\nold\n<!-- cpu_model: end -->\nafter\n")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "DOCS", page)
    return tmp_path


def test_small_form(results: Path, monkeypatch: pytest.MonkeyPatch):
    options = ["--models", "llama", "--modes", "eager", "--small", "--no-torchao", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_cpu_model", *options, "--save", "--write-docs"])
    bench_cpu_model.main()
    rows = json.loads((results / "cpu_model.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["decoder, prefill 32", "decoder, decode 1"]
    assert all(row[name] > 0 for row in rows for name in ("float ms", *bench_cpu_model.RECIPES))
    page = (results / "results.md").read_text()
    assert page.startswith("before\n<!-- cpu_model: begin -->\n| | decoder, prefill 32, eager, float32 |")
    assert "old" not in page
    assert page.endswith("<!-- cpu_model: end -->\nafter\n")
    if importlib.util.find_spec("matplotlib"):
        from benchmarks import plot_cpu

        (drawn,) = plot_cpu.draw(results, results)
        assert drawn.read_bytes().startswith(b"\x89PNG")


def test_marks_are_missing(results: Path):
    with pytest.raises(ValueError, match="has no <!-- other: begin -->"):
        common.write_docs("other", "text")


@torch.no_grad()
def test_the_decoder_continues_its_prompt():
    """Decoding the last token after the others were read gives what reading all of them gives; all layers are
    quantized."""
    workload = bench_cpu_model.llama(True, torch.float32)
    models = bench_cpu_model.candidates(workload.model, torchao=False)
    prefill, decode = workload.runs.values()
    for name, model in models.items():
        with record_kernels() as ran:
            wanted = prefill(model)
        assert sum(kernel.startswith("linear:") for kernel in ran) == (0 if name == "float" else 2 * 7 + 1)
        torch.testing.assert_close(decode(model), wanted, rtol=1e-4, atol=1e-4)
