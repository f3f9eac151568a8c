"""Recipes with a given activation scale: float8_static_activation_float8_weight, int8_static_activation_int8_weight."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import qtorch
from qtorch import (
    PerGroup,
    PerTensor,
    compute_error,
    float8_dynamic_activation_float8_weight,
    float8_static_activation_float8_weight,
    int8_dynamic_activation_int8_weight,
    int8_static_activation_int8_weight,
    load_quantized,
    quantize_,
    save_quantized,
)
from qtorch.kernels import record_kernels
from qtorch.kernels.linear import reference
from qtorch.primitives import from_json, to_json
from qtorch.recipes.base import Recipe

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")

MAKERS = [float8_static_activation_float8_weight, int8_static_activation_int8_weight]
LARGEST = {float8_static_activation_float8_weight: 448, int8_static_activation_int8_weight: 127}
DYNAMIC = {
    float8_static_activation_float8_weight: float8_dynamic_activation_float8_weight(PerTensor()),
    int8_static_activation_int8_weight: int8_dynamic_activation_int8_weight(),
}
every_maker = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.name)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).requires_grad_(False)


@every_maker
def test_is_a_value(make: Callable[..., Recipe]) -> None:
    recipe = make(0.25)
    assert str(recipe) == f"{make.name}(scale=0.25)"
    for scale in (torch.tensor(0.25), torch.full((1,), 0.25), torch.full((1, 1), 0.25, dtype=torch.bfloat16)):
        assert make(scale) == recipe
        assert hash(make(scale)) == hash(recipe)
    assert type(make(1).scale) is float
    assert make(0.5) != recipe
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe
    assert getattr(qtorch, make.name) is getattr(qtorch.quantize_api, make.name) is make


@every_maker
def test_a_scale_that_is_none(make: Callable[..., Recipe]) -> None:
    for scale in (0, -1.0, float("inf"), float("nan"), 1e-40, 1e39, torch.tensor(-2.0)):
        with pytest.raises(ValueError, match=f"^{make.name}: scale is positive, finite and a normal number in fp32"):
            make(scale)
    for scale, got in [
        ("1", "'1'"),
        (True, "True"),
        (torch.ones(2), "a tensor of shape (2,)"),
        (torch.ones(1, device="meta"), "a tensor of shape (1,)"),
    ]:
        message = f"^{make.name}: scale is a number or a tensor of one element, got {re.escape(got)}$"
        with pytest.raises(TypeError, match=message):
            make(scale)


@every_maker
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scale_travels_with_the_weight(make: Callable[..., Recipe], dtype: torch.dtype) -> None:
    layer = nn.Linear(64, 32, dtype=dtype)
    quantize_(layer, make(0.1))
    scale = layer.weight.act_scale
    assert (tuple(scale.shape), scale.dtype, scale.item()) == ((1, 1), torch.float32, torch.tensor(0.1).item())
    assert layer.weight.scheme.spec.static


@every_maker
def test_the_scale_of_the_input_is_as_good_as_one_for_each_token(make: Callable[..., Recipe]) -> None:
    """By a few dB, and a quarter of it clips."""
    x, layer = torch.randn(5, 64), nn.Linear(64, 32).requires_grad_(False)
    scale = x.abs().max() / LARGEST[make]
    errors = []
    for recipe in (DYNAMIC[make], make(scale), make(scale / 4)):
        quantized = copy.deepcopy(layer)
        quantize_(quantized, recipe)
        errors.append(compute_error(layer(x), quantized(x)))
    dynamic, static, clipped = errors
    assert dynamic - 8 < static < dynamic + 2
    assert 0 < clipped < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_accumulates_in_integers(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(96, 64, dtype=dtype).requires_grad_(False), torch.randn(3, 5, 96, dtype=dtype)
    wanted = layer(x)
    report = quantize_(layer, int8_static_activation_int8_weight(0.035))
    with record_kernels() as ran:
        y = layer(x)
    assert ran[:2] == ["linear:int8_scaled_mm", "int_matmul"]
    assert report.quantized[0].kernel == "int8_scaled_mm"
    assert torch.equal(y, reference.linear(x, layer.weight, layer.bias))
    assert 34 < compute_error(wanted, y) < 46


@every_maker
def test_one_scale_a_layer_by_a_mapping(make: Callable[..., Recipe], tmp_path: Path) -> None:
    model, x = mlp(), torch.randn(7, 64)
    wanted, hidden = model(x), model[1](model[0](x))
    largest = LARGEST[make]
    quantize_(model, {"0": make(x.abs().max() / largest), "2": make(hidden.abs().max() / largest)})
    y = model(x)
    assert model[0].weight.act_scale.item() > model[2].weight.act_scale.item()
    assert 24 < compute_error(wanted, y) < 44
    save_quantized(model, tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = mlp()
    assert torch.equal(load_quantized(other, tmp_path / "model.safetensors")(x), y)
    other = mlp()
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other(x), y)


@every_maker
def test_compile_traces_one_graph_for_all_batches(make: Callable[..., Recipe]) -> None:
    model = mlp()
    quantize_(model, make(0.03))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(torch.randn(3, 64))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (4, 7, 33):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(compiled(x), model(x))


@every_maker
def test_gradient_reaches_the_input(make: Callable[..., Recipe]) -> None:
    layer, x = nn.Linear(64, 32).requires_grad_(False), torch.randn(5, 64, requires_grad=True)
    quantize_(layer, make(0.03))
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    assert compute_error(layer.weight.dequantize().sum(0).expand(5, -1), gradient) > 100


def test_wrong_types() -> None:
    with pytest.raises(ValueError, match=r"granularity is PerRow\(\) or PerTensor\(\), got PerGroup\(group_size=32\)"):
        float8_static_activation_float8_weight(1.0, granularity=PerGroup(32))
    for options in ({"activation_dtype": torch.int8}, {"weight_dtype": torch.int8}):
        with pytest.raises(ValueError, match=r"float8_static_activation_float8_weight takes float8_e4m3fn.*, got int8"):
            float8_static_activation_float8_weight(1.0, **options)
    assert float8_static_activation_float8_weight(1.0).granularity == PerTensor()
