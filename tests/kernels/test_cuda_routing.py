"""Which kernel a CUDA input gets, asked of the registry and of a compiler: no GPU is needed for that."""

from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, PackedLayout, PerBlock, PerGroup, PerRow, QuantSpec
from qtorch.kernels import features
from qtorch.kernels.registry import Problem, candidates, choose
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
    qtorch.float8_weight_only(): ("weight_only_mm", None),
    qtorch.nf4_weight_only(): ("lut_weight_mm", None),
    qtorch.vector_codebook_weight_only(): ("cuda_vector_codebook_mm", []),
}


def problem_of(recipe, device="cuda", dtype=torch.bfloat16):
    layer = nn.Linear(128, 64, bias=False, dtype=dtype)
    qtorch.quantize_(layer, recipe)
    return Problem("linear", layer.weight.scheme, dtype, device)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_kernel_of_each_recipe(recipe):
    assert choose(problem_of(recipe)).name == RECIPES[recipe][0]
    assert choose(problem_of(recipe, "cpu")).device in (None, "cpu")


def on_cuda(weight: Tensor) -> Tensor:
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
    layer = nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
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
    assert ran == [*before, kernel]


@pytest.fixture
def without(monkeypatch):
    """Answer that a feature is missing."""

    def hide(feature):
        there = features.cuda_lacks
        monkeypatch.setattr(features, "cuda_lacks", lambda name: f"no {name}" if name == feature else there(name))

    return hide


def test_without_triton_there_is_a_reason(without):
    without("triton")
    for recipe, kernel in (
        (qtorch.int8_weight_only(), "weight_only_mm"),
        (qtorch.int4_weight_only(32), "packed_weight_mm"),
        (qtorch.int8_dynamic_activation_int8_weight(), "int8_scaled_mm"),
    ):
        problem = problem_of(recipe)
        assert choose(problem).name == kernel
        assert "no triton" in [reason for _, reason in candidates(problem)]


def test_on_gpus_without_float8_products(without):
    without("float8")
    assert choose(problem_of(qtorch.float8_dynamic_activation_float8_weight())).name == "emulated_scaled_mm"


def reason(kernel, spec, shape=(64, 128), dtype=torch.bfloat16, view=lambda weight: weight):
    weight = view(AffineQuantizedTensor.from_float(torch.randn(shape).bfloat16(), spec))
    return {k.name: why for k, why in candidates(Problem("linear", weight.scheme, dtype, "cuda"))}[kernel]


def test_what_they_refuse():
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


def test_features(monkeypatch):
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
