"""Which kernel a CUDA input gets, asked of the registry: no GPU is needed for that."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, PackedLayout, PerBlock, PerGroup, PerRow, QuantSpec
from qtorch.kernels import features
from qtorch.kernels.registry import Problem, candidates, choose
from qtorch.primitives import ZeroPointDomain

RECIPES = {
    qtorch.int8_weight_only(): "cuda_weight_mm",
    qtorch.int4_weight_only(group_size=32): "cuda_weight_mm",
    qtorch.int4_weight_only(group_size=32, zero_point_domain=ZeroPointDomain.FLOAT): "cuda_weight_mm",
    qtorch.int4_weight_only(
        group_size=32, zero_point_domain=ZeroPointDomain.FLOAT, layout=qtorch.TensorCoreTiledLayout()
    ): "int4_tiled_mm",
    qtorch.intx_weight_only("int3"): "cuda_weight_mm",
    qtorch.uintx_weight_only("uint2"): "cuda_weight_mm",
    qtorch.int8_dynamic_activation_int8_weight(): "cuda_int8_mm",
    qtorch.int8_dynamic_activation_int8_weight(qtorch.MappingType.ASYMMETRIC): "cuda_int8_mm",
    qtorch.int8_dynamic_activation_int4_weight(): "cuda_int8_mm",
    qtorch.float8_dynamic_activation_float8_weight(): "float8_scaled_mm",
    qtorch.float8_dynamic_activation_float8_weight(qtorch.PerTensor()): "float8_scaled_mm",
    qtorch.float8_weight_only(): "weight_only_mm",
    qtorch.nf4_weight_only(): "lut_weight_mm",
}


def problem_of(recipe, device="cuda", dtype=torch.bfloat16):
    layer = nn.Linear(128, 64, bias=False, dtype=dtype)
    qtorch.quantize_(layer, recipe)
    return Problem("linear", layer.weight.scheme, dtype, device)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_kernel_of_each_recipe(recipe):
    assert choose(problem_of(recipe)).name == RECIPES[recipe]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_cpu_inputs_do_not_get_them(recipe):
    assert choose(problem_of(recipe, "cpu")).device in (None, "cpu")


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
