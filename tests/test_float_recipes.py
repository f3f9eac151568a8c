"""Recipes with floating-point codes: float8, the small formats, and the OCP block formats."""

import pytest
import torch
from torch import nn

from qtorch import (
    PerGroup,
    PerRow,
    PerTensor,
    compute_error,
    float8_dynamic_activation_float8_weight,
    float8_dynamic_activation_int4_weight,
    float8_static_activation_float8_weight,
    float8_weight_only,
    fpx_weight_only,
    load_quantized,
    mxfp4_dynamic_activation_mxfp4_weight,
    mxfp4_weight_only,
    mxfp6_weight_only,
    mxfp8_dynamic_activation_mxfp8_weight,
    mxfp8_weight_only,
    nvfp4_dynamic_activation_nvfp4_weight,
    nvfp4_weight_only,
    quantize_,
    save_quantized,
)
from qtorch.kernels import record_kernels
from qtorch.kernels.linear import reference
from qtorch.primitives import from_json, to_json
from qtorch.recipes.base import Recipe

# recipe, kernel, SQNR of a layer's output in dB: at least, at most
CASES = [
    (float8_weight_only(), "weight_only_mm", 28, 36),
    (float8_weight_only(torch.float8_e5m2), "weight_only_mm", 22, 30),
    (float8_dynamic_activation_float8_weight(), "emulated_scaled_mm", 25, 33),
    (float8_dynamic_activation_float8_weight(PerTensor()), "emulated_scaled_mm", 25, 33),
    (float8_static_activation_float8_weight(0.01), "emulated_scaled_mm", 25, 33),
    (float8_static_activation_float8_weight(0.01, granularity=PerRow()), "emulated_scaled_mm", 25, 33),
    (float8_dynamic_activation_int4_weight(32), "emulated_scaled_mm", 17, 25),
    (float8_dynamic_activation_int4_weight(-1, torch.float8_e5m2), "emulated_scaled_mm", 15, 23),
    (fpx_weight_only(3, 2), "packed_weight_mm", 22, 30),
    (fpx_weight_only(2, 3), "packed_weight_mm", 26, 34),
    (fpx_weight_only(2, 2), "packed_weight_mm", 20, 28),
    (fpx_weight_only(3, 1), "packed_weight_mm", 16, 24),
    (fpx_weight_only(2, 1), "packed_weight_mm", 14, 22),
    (fpx_weight_only(2, 0), "packed_weight_mm", 8, 16),
    (mxfp8_weight_only(), "weight_only_mm", 27, 35),
    (mxfp6_weight_only(), "packed_weight_mm", 27, 35),
    (mxfp4_weight_only(), "packed_weight_mm", 15, 23),
    (nvfp4_weight_only(), "packed_weight_mm", 16, 24),
    (nvfp4_dynamic_activation_nvfp4_weight(), "emulated_scaled_mm", 13, 21),
    (mxfp8_dynamic_activation_mxfp8_weight(), "emulated_scaled_mm", 24, 32),
    (mxfp4_dynamic_activation_mxfp4_weight(), "emulated_scaled_mm", 12, 20),
]
every_case = pytest.mark.parametrize(("recipe", "kernel", "low", "high"), CASES, ids=[str(case[0]) for case in CASES])
every_recipe = pytest.mark.parametrize("recipe", [case[0] for case in CASES], ids=str)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output(recipe: Recipe, kernel: str, low: float, high: float, dtype: torch.dtype) -> None:
    layer = nn.Linear(96, 64, dtype=dtype).requires_grad_(False)
    x = torch.randn(5, 96, dtype=dtype)
    y = layer(x)
    quantize_(layer, recipe)
    with record_kernels() as ran:
        z = layer(x)
    assert ran[0] == f"linear:{kernel}"
    assert z.dtype == dtype
    assert low < compute_error(y, z) < high
    expected = reference.linear(x, layer.weight, layer.bias)
    assert compute_error(expected, z) > (110 if dtype == torch.float32 else 40)


@every_recipe
def test_save_and_load(recipe: Recipe, tmp_path) -> None:
    layer = nn.Linear(64, 32)
    quantize_(layer, recipe)
    save_quantized(layer, tmp_path / "layer.safetensors")
    with torch.device("meta"):
        fresh = nn.Linear(64, 32)
    load_quantized(fresh, tmp_path / "layer.safetensors")
    x = torch.randn(3, 64)
    assert torch.equal(fresh(x), layer(x))
    assert from_json(to_json(recipe)) == recipe


@pytest.mark.parametrize(
    "recipe",
    [
        fpx_weight_only(2, 1),
        mxfp4_dynamic_activation_mxfp4_weight(),
        nvfp4_dynamic_activation_nvfp4_weight(),
        float8_weight_only(),
        float8_dynamic_activation_int4_weight(32),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compile(recipe: Recipe, backend: str) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).requires_grad_(False)
    quantize_(model, recipe)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    compiled(torch.randn(3, 64))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (4, 7, 33):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(compiled(x), model(x))


def test_what_rows_share_in_nvfp4() -> None:
    """One fp32 scale for the batch: small rows are accurate while scales of blocks are normal numbers, then zeros."""
    layer = nn.Linear(256, 96, bias=False)
    quantize_(layer, nvfp4_dynamic_activation_nvfp4_weight())
    rows = torch.randn(4, 256).clamp(-3, 3)
    weight = layer.weight.dequantize()
    for ratio, low, high in ((2.0**12, 14, 30), (2.0**22, -0.01, 0.01)):
        x = rows.clone()
        x[0] *= ratio
        assert low < compute_error(x[1:] @ weight.t(), layer(x)[1:]) < high
    x[0, 0] = torch.inf
    assert compute_error(x[1:] @ weight.t(), layer(x)[1:]) > 14


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"granularity is PerRow\(\) or PerTensor\(\), got PerGroup\(group_size=32\)"):
        float8_dynamic_activation_float8_weight(PerGroup(32))
    with pytest.raises(ValueError, match="float7_e3m3 is not a quantized type"):
        fpx_weight_only(3, 3)
    with pytest.raises(ValueError, match="does not divide"):
        quantize_(nn.Linear(40, 8), mxfp4_weight_only())
