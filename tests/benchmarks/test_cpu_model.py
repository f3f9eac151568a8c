"""benchmarks/bench_cpu_model.py in its small form: it runs, saves, writes its tables into the page, and is drawn."""

import functools
import importlib.util
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import bench_cpu_model, common
from benchmarks.cpu_models import GENERATED, WORKLOADS, perplexity_ratio
from qtorch.kernels import record_kernels


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models are no work for more, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where everything is written instead of the repository."""
    page = tmp_path / "results.md"
    page.write_text("before\n<!-- cpu_model: begin -->\nold\n<!-- cpu_model: end -->\nafter\n")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "DOCS", tmp_path)
    return tmp_path


def test_small_form(results: Path, monkeypatch: pytest.MonkeyPatch):
    options = ["--models", "llama", "--modes", "eager", "--small", "--no-peers", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_cpu_model", *options, "--save", "--write-docs"])
    bench_cpu_model.main()
    rows = json.loads((results / "cpu_model.json").read_text())["rows"]
    assert [row["what"] for row in rows] == [
        "decoder, prefill 32",
        "decoder, decode 1",
        f"decoder, prompt and {GENERATED} tokens",
    ]
    assert all(row[name] > 0 for row in rows for name in ("float ms", *bench_cpu_model.RECIPES))
    for name in bench_cpu_model.RECIPES:
        scores = [row["scores"][name] for row in rows]
        assert [kind for kind, _ in scores] == ["cosine", "cosine", "perplexity"]
        assert all(abs(value - 1) < 0.05 for _, value in scores)
    page = (results / "results.md").read_text()
    assert page.startswith("before\n<!-- cpu_model: begin -->\n")
    assert "\n| | decoder, prefill 32, eager, float32 |" in page
    assert "\n| | decoder, prefill 32, float32: cosine |" in page
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
    workload = WORKLOADS["llama"](True, torch.float32)
    models = bench_cpu_model.candidates(workload, peers=False)
    prefill, decode, _ = workload.runs.values()
    for name, model in models.items():
        with record_kernels() as ran:
            wanted = prefill(model)
        assert sum(kernel.startswith("linear:") for kernel in ran) == (0 if name == "float" else 2 * 7 + 1)
        torch.testing.assert_close(decode(model), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mixture", "vision"])
def test_workloads_of_transformers(name: str):
    """Everything but routers is quantized, and the outputs are near those of the float model."""
    pytest.importorskip("transformers")
    workload = WORKLOADS[name](True, torch.float32)
    models = bench_cpu_model.candidates(workload, peers=False)
    for what, run in workload.runs.items():
        calls = {key: functools.partial(run, model) for key, model in models.items()}
        for key, (_, score) in bench_cpu_model.scores_of(workload, what, calls).items():
            with record_kernels() as ran:
                calls[key]()
            assert any("experts" in kernel for kernel in ran) == (name == "mixture")
            assert sum(kernel.startswith("linear:") for kernel in ran) >= 8
            assert 0.95 < score < 1 - 1e-7


@torch.no_grad()
def test_onnxruntime_runs_the_same_graph():
    pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    workload = WORKLOADS["vision"](True, torch.float32)
    ((what, run),) = workload.runs.items()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = bench_cpu_model.onnx_models(workload)
    calls = {name: functools.partial(run, model) for name, model in {"float": workload.model, **models}.items()}
    scores = bench_cpu_model.scores_of(workload, what, calls)
    assert scores["onnxruntime float"][1] == pytest.approx(1, abs=1e-6)
    assert 0.99 < scores["onnxruntime int8 dynamic"][1] < 1 - 1e-6


def test_the_ratio_of_perplexities():
    tokens = torch.tensor([0, 1])
    sure, even = torch.tensor([[20.0, 0.0], [0.0, 20.0]]), torch.zeros(2, 2)
    assert perplexity_ratio(tokens, even, sure) == pytest.approx(2, rel=1e-6)
    assert perplexity_ratio(tokens, sure, sure) == 1
