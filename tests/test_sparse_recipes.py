"""Recipes that prune to 2:4 before they quantize."""

import pytest
import torch
from torch import nn

from qtorch import (
    MappingType,
    PerGroup,
    PerTensor,
    SemiSparseLayout,
    compute_error,
    float8_dynamic_activation_float8_semi_sparse_weight,
    float8_dynamic_activation_float8_weight,
    int8_dynamic_activation_int8_semi_sparse_weight,
    int8_dynamic_activation_int8_weight,
    load_quantized,
    quantize_,
    save_quantized,
)
from qtorch.kernels import record_kernels
from qtorch.kernels.linear import reference
from qtorch.primitives import from_json, is_2_4, prune_2_4, to_json
from qtorch.quantize_api import Recipe
from tests.rounding import assert_same_product

INT8 = int8_dynamic_activation_int8_semi_sparse_weight()
FLOAT8 = float8_dynamic_activation_float8_semi_sparse_weight()

# recipe, its dense form, kernel, SQNR of a layer that is 2:4 already in dB: at least, at most
CASES = [
    (INT8, int8_dynamic_activation_int8_weight(), "semi_sparse_int8_scaled_mm", 37, 50),
    (
        int8_dynamic_activation_int8_semi_sparse_weight(MappingType.ASYMMETRIC),
        int8_dynamic_activation_int8_weight(MappingType.ASYMMETRIC),
        "semi_sparse_int8_scaled_mm",
        37,
        50,
    ),
    (FLOAT8, float8_dynamic_activation_float8_weight(), "emulated_semi_sparse_mm", 25, 34),
    (
        float8_dynamic_activation_float8_semi_sparse_weight(PerTensor()),
        float8_dynamic_activation_float8_weight(PerTensor()),
        "emulated_semi_sparse_mm",
        25,
        34,
    ),
]
every_case = pytest.mark.parametrize(
    ("recipe", "dense", "kernel", "low", "high"), CASES, ids=[str(case[0]) for case in CASES]
)
every_recipe = pytest.mark.parametrize("recipe", [case[0] for case in CASES], ids=str)


def layer(k: int = 90, dtype: torch.dtype = torch.float32, sparse: bool = False) -> nn.Linear:
    made = nn.Linear(k, 64, dtype=dtype).requires_grad_(False)
    made.weight.normal_()
    if sparse:
        made.weight.copy_(prune_2_4(made.weight))
    return made


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_2_4_loses_no_more_than_in_the_dense_form(
    recipe: Recipe, dense: Recipe, kernel: str, low: float, high: float, dtype: torch.dtype
) -> None:
    sparse, plain = layer(dtype=dtype, sparse=True), nn.Linear(90, 64, dtype=dtype)
    plain.load_state_dict(sparse.state_dict())
    x = torch.randn(5, 90, dtype=dtype)
    y = sparse(x)
    report = quantize_(sparse, recipe)
    quantize_(plain.requires_grad_(False), dense)
    with record_kernels() as ran:
        z = sparse(x)
    assert ran[0] == f"linear:{kernel}"
    assert report.quantized[0].kernel == kernel
    assert torch.equal(z, plain(x))
    assert low < compute_error(y, z) < high
    expected = reference.linear(x, sparse.weight, sparse.bias)
    if recipe.linear_spec().weight.dtype.name == "int8":
        assert torch.equal(z, expected)
    else:
        assert compute_error(expected, z) > (40 if dtype == torch.bfloat16 else 110)


@every_recipe
def test_what_pruning_costs_is_reported(recipe: Recipe) -> None:
    model, x = layer(256), torch.randn(64, 256)
    weight, y = model.weight.clone(), model(x)
    row = quantize_(model, recipe).quantized[0]
    assert 8 < row.sqnr < 10
    assert 8 < compute_error(y, model(x)) < 10
    # 5 bits an element, and a scale in fp32 for each row, or for all.
    assert row.bytes_after == 64 * 256 * 5 // 8 + model.weight.scale.numel() * 4
    # What is kept is quantized as finely as it would be alone.
    kept = model.weight.dequantize()
    assert is_2_4(kept)
    assert 26 < compute_error(prune_2_4(weight), kept) < 50


@every_recipe
@pytest.mark.parametrize("k", [1, 3, 6, 33])
def test_rows_of_any_length(recipe: Recipe, k: int) -> None:
    model, x = layer(k), torch.randn(3, k)
    quantize_(model, recipe)
    assert model.weight.shape == (64, k)
    wanted = reference.linear(x, model.weight, model.bias)
    assert_same_product(model(x), wanted, x, model.weight.dequantize(), model.bias)


@every_recipe
def test_save_and_load(recipe: Recipe, tmp_path) -> None:
    model = layer()
    quantize_(model, recipe)
    save_quantized(model, tmp_path / "layer.safetensors")
    with torch.device("meta"):
        fresh = nn.Linear(90, 64)
    load_quantized(fresh, tmp_path / "layer.safetensors")
    x = torch.randn(3, 90)
    assert fresh.weight.scheme.layout == SemiSparseLayout()
    assert torch.equal(fresh(x), model(x))
    assert from_json(to_json(recipe)) == recipe


@every_recipe
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_compile(recipe: Recipe, grad: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).requires_grad_(False)
    quantize_(model, recipe)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(torch.randn(3, 64, requires_grad=grad))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (4, 7, 33):
            x = torch.randn(rows, 64, requires_grad=grad)
            got, wanted = compiled(x), model(x)
            torch.testing.assert_close(got, wanted)
            if grad:
                torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (got, wanted)))


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "low"), [(INT8, 30), (FLOAT8, 25)], ids=str)
def test_inductor(recipe: Recipe, low: float) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).requires_grad_(False)
    quantize_(model, recipe)
    x = torch.randn(5, 64)
    compiled = torch.compile(model, fullgraph=True)
    compiled(x)
    with record_kernels() as ran:
        y = compiled(x)
    assert any(name.startswith("semi_sparse") for name in ran)
    # A code may round the other way after a fused multiplication.
    assert compute_error(model(x), y) > low


def test_names_and_errors() -> None:
    assert str(INT8) == "int8_dynamic_activation_int8_semi_sparse_weight()"
    assert int8_dynamic_activation_int8_weight() != INT8
    with pytest.raises(ValueError, match=r"semi_sparse_weight: granularity is PerRow\(\) or PerTensor\(\), got PerG"):
        float8_dynamic_activation_float8_semi_sparse_weight(PerGroup(32))
    model = layer()
    model.weight[3, 5] = float("inf")
    with pytest.raises(ValueError, match="has 1 values of 5760 that are NaN or infinite"):
        quantize_(model, INT8)
