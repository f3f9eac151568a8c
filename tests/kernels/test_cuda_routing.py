"""Which kernel a CUDA input gets, and with which launch configuration: no GPU is needed to ask."""

import json
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, PackedLayout, PerBlock, PerGroup, PerRow, QuantSpec
from qtorch.kernels import LaunchConfig, autotune, features, record_kernels
from qtorch.kernels.cuda import launch_config
from qtorch.kernels.cuda.launch_config import SHIPPED, Table, find, forced, launch
from qtorch.kernels.registry import Problem, candidates, choose, forget_choices
from qtorch.primitives import ZeroPointDomain
from tests.fast_part import matrix_but

FLOAT, TILED = ZeroPointDomain.FLOAT, qtorch.TensorCoreTiledLayout()
ROWWISE, ASYMMETRIC_ROWS = ["cuda_quantize_rowwise"], ["cuda_quantize_asymmetric"]
# recipe: the kernel of its products, and what its graph runs before it
RECIPES = {
    qtorch.int8_weight_only(): ("cuda_weight_mm", []),
    qtorch.int4_weight_only(group_size=32): ("cuda_weight_mm", []),
    qtorch.int4_weight_only(32, FLOAT): ("cuda_weight_mm", []),
    qtorch.int4_weight_only(32, FLOAT, layout=TILED): ("int4_tiled_mm", None),
    qtorch.intx_weight_only("int3"): ("cuda_weight_mm", None),
    qtorch.uintx_weight_only("uint2"): ("cuda_weight_mm", []),
    qtorch.int8_static_activation_int8_weight(scale=0.1): ("cuda_int8_mm", []),
    qtorch.int8_dynamic_activation_int8_weight(): ("cuda_int8_mm", ROWWISE),
    qtorch.int8_dynamic_activation_int8_weight(qtorch.MappingType.ASYMMETRIC): ("cuda_int8_mm", ASYMMETRIC_ROWS),
    qtorch.int8_dynamic_activation_int4_weight(): ("cuda_int8_mm", ASYMMETRIC_ROWS),
    qtorch.float8_dynamic_activation_float8_weight(): ("float8_scaled_mm", ROWWISE),
    qtorch.float8_dynamic_activation_float8_weight(qtorch.PerTensor()): ("float8_scaled_mm", None),
    qtorch.float8_dynamic_activation_float8_weight(PerBlock((64, 64))): ("tile_scaled_mm", ["cuda_quantize_tilewise"]),
    qtorch.float8_weight_only(): ("cuda_number_mm", []),
    qtorch.mxfp4_weight_only(): ("cuda_number_mm", []),
    qtorch.nvfp4_weight_only(): ("cuda_number_mm", None),
    qtorch.nf4_weight_only(): ("cuda_number_mm", None),
    qtorch.nf4_weight_only(double_quantize=False): ("cuda_number_mm", []),
    qtorch.lut_weight_only(): ("cuda_number_mm", []),
    qtorch.vector_codebook_weight_only(): ("cuda_vector_codebook_mm", []),
}


def problem_of(recipe, device="cuda", dtype=torch.bfloat16):
    layer = torch.nn.Linear(128, 64, bias=False, dtype=dtype)
    qtorch.quantize_(layer, recipe)
    return Problem("linear", layer.weight.scheme, dtype, device)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_kernel_of_each_recipe(recipe):
    assert choose(problem_of(recipe)).name == RECIPES[recipe][0]
    assert choose(problem_of(recipe, "cpu")).device in (None, "cpu")


def on_cuda(weight: torch.Tensor) -> torch.Tensor:
    """The quantized weight with fake tensors on CUDA in it; called in a `FakeTensorMode`."""
    inner = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
        for name, tensor in weight.inner_tensors.items()
    }
    return type(weight)(inner, weight.scheme)


@pytest.mark.skipif(features.cuda_lacks("triton") is not None, reason="needs triton")
@pytest.mark.parametrize("dynamic", matrix_but((True,), (False, True)))
@pytest.mark.parametrize("recipe", [recipe for recipe, (_, before) in RECIPES.items() if before is not None], ids=str)
def test_linear_is_one_graph_with_the_kernels_for_cuda(recipe, dynamic):
    """As a compiler sees it; tensors are fake, so that no GPU is needed."""
    layer = torch.nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    qtorch.quantize_(layer, recipe)
    ran: list[str] = []

    def keep(graph, _inputs):
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        ran.extend(str(target).split(".")[1] for target in targets if str(target).startswith("qtorch."))
        return make_boxed_func(lambda *_: [torch.empty(7, 128)])

    kernel, before = RECIPES[recipe]
    compiled = torch.compile(functional.linear, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=dynamic)
    with FakeTensorMode():
        compiled(torch.empty(7, 256, dtype=torch.bfloat16, device="cuda"), on_cuda(layer.weight.detach()))
    assert ran == [*before, kernel.replace("number", "weight")]  # one operator


@pytest.fixture
def without(monkeypatch):
    """Answer that a feature is missing."""

    def hide(feature):
        there = features.cuda_lacks
        monkeypatch.setattr(features, "cuda_lacks", lambda name: f"no {name}" if name == feature else there(name))
        forget_choices()

    yield hide
    forget_choices()


def test_features_reasons_and_refusals(monkeypatch, without):
    without("triton")
    for recipe, kernel in (
        (qtorch.int8_weight_only(), "weight_only_mm"),
        (qtorch.int4_weight_only(32), "packed_weight_mm"),
        (qtorch.int8_dynamic_activation_int8_weight(), "int8_scaled_mm"),
    ):
        problem = problem_of(recipe)
        assert choose(problem).name == kernel
        assert "no triton" in [reason for _, reason in candidates(problem)]
    without("float8")
    assert choose(problem_of(qtorch.float8_dynamic_activation_float8_weight())).name == "emulated_scaled_mm"
    monkeypatch.undo()
    token = QuantSpec("int8", PerRow(), quant_min=-127)
    int4 = LinearSpec(QuantSpec("int4", PerGroup(32)), layout=PackedLayout())
    assert "transposed" in reason("cuda_weight_mm", int4, view=lambda weight: weight.t())
    assert "transposed" in reason("cuda_int8_mm", replace(int4, activation=token), view=lambda weight: weight.t())
    assert "a scale of its own" in reason("cuda_weight_mm", LinearSpec(QuantSpec("int8", PerBlock((8, 16)))))
    assert "takes fp32, fp16 or bf16 inputs" in reason("cuda_weight_mm", int4, dtype=torch.float64)
    assert "a 2-d weight" in reason("cuda_weight_mm", LinearSpec(QuantSpec("int8")), (2, 64, 128))
    real = QuantSpec("uint4", PerGroup(32), qtorch.MappingType.ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False)
    assert "integer zero points" in reason("cuda_int8_mm", LinearSpec(real, token))
    e5m2 = QuantSpec("float8_e5m2", zero_point_domain=ZeroPointDomain.NONE)
    assert "float8_e5m2 by float8_e5m2" in reason("float8_scaled_mm", LinearSpec(e5m2, e5m2))
    grouped = replace(e5m2, dtype="float8_e4m3fn", granularity=PerGroup(32))
    assert "whole rows or tensors" in reason("float8_scaled_mm", LinearSpec(grouped, e5m2))
    e4m3 = replace(e5m2, dtype="float8_e4m3fn")
    assert "blocks of one size" in reason("tile_scaled_mm", LinearSpec(e4m3, grouped))
    assert "in fp32" in reason("tile_scaled_mm", LinearSpec(grouped, grouped))
    features._cuda_lacks.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert features.cuda_lacks("float8") == "needs compute capability 8.9, the GPU has (8, 0)"
    features._cuda_lacks.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert features.cuda_lacks("float8") is None
    monkeypatch.setattr(features, "_importable", lambda name: False)
    assert features.cuda_lacks("triton") == "needs triton, which is not installed"
    features._cuda_lacks.cache_clear()


def reason(kernel, spec, shape=(64, 128), dtype=torch.bfloat16, view=lambda weight: weight):
    weight = view(AffineQuantizedTensor.from_float(torch.randn(shape).bfloat16(), spec))
    return {k.name: why for k, why in candidates(Problem("linear", weight.scheme, dtype, "cuda"))}[kernel]


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


def test_tables_and_entries(monkeypatch):
    mine = table(f={1: {"block_m": 16}, 64: {"block_m": 64}})
    assert mine.nearest("f", "int8", (1, 96, 64)).block_m == 16
    assert mine.nearest("f", "int8", (16, 64, 64)).block_m == 64
    assert mine.nearest("f", "int4", (1, 4096, 64)).block_m == 16, "of another dtype rather than none"
    assert mine.nearest("g", "int8", (1, 64, 64)) is None
    assert find("int8_scaled_mm", "int8", (3000, 4096, 4096)) == find("int8_scaled_mm", "int8", (4096, 4096, 4096))
    assert find("no such op", "int8", (1, 1, 1)) == LaunchConfig()

    # Its own by name, else that of the nearest size with the same capability, else the default.
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


def test_forced_and_nothing_is_timed_unasked():
    with forced(LaunchConfig(64), num_warps=8):
        assert find("f", "int8", (1, 1, 1)) == LaunchConfig(64, num_warps=8)
    assert find("f", "int8", (1, 1, 1)) == LaunchConfig()
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
