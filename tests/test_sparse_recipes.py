"""Recipes that prune, to 2:4 or by blocks, before they quantize."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import qtorch
from qtorch import compute_error, load_quantized, quantize_, save_quantized
from qtorch.calibration import Descent, ScaleRefit, calibrated, gptq
from qtorch.primitives import is_2_4, prune_2_4, prune_blocks, pruning
from qtorch.recipes.base import Recipe, WeightRecipe
from tests.refusals import refuses
from tests.rounding import assert_same_product

ASYMMETRIC, PER_TENSOR = qtorch.MappingType.ASYMMETRIC, qtorch.PerTensor()
INT8 = qtorch.int8_dynamic_activation_int8_semi_sparse_weight()
FLOAT8 = qtorch.float8_dynamic_activation_float8_semi_sparse_weight()

# recipe, its dense form, another argument, kernel, SQNR of a layer that is 2:4 already in dB: at least, at most
PAIRS = [
    (type(INT8), qtorch.int8_dynamic_activation_int8_weight, ASYMMETRIC, "semi_sparse_int8_scaled_mm", 37, 50),
    (type(FLOAT8), qtorch.float8_dynamic_activation_float8_weight, PER_TENSOR, "emulated_semi_sparse_mm", 25, 34),
]
CASES = [(sparse(*given), dense(*given), *wanted) for sparse, dense, o, *wanted in PAIRS for given in ((), (o,))]
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
    with qtorch.kernels.record_kernels() as ran:
        z = sparse(x)
    assert ran[0] == f"linear:{kernel}"
    assert report.quantized[0].kernel == kernel
    assert torch.equal(z, plain(x))
    assert low < compute_error(y, z) < high
    expected = qtorch.kernels.linear.reference.linear(x, sparse.weight, sparse.bias)
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
    wanted = qtorch.kernels.linear.reference.linear(x, model.weight, model.bias)
    assert_same_product(model(x), wanted, x, model.weight.dequantize(), model.bias)


BASES = [
    qtorch.int8_weight_only(), qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int8_dynamic_activation_int4_weight(group_size=32), qtorch.intx_weight_only("int4", group_size=32),
]  # fmt: skip


@pytest.mark.parametrize("base", BASES, ids=str)
def test_blocks_are_dropped_and_the_rest_is_quantized(base: WeightRecipe, tmp_path: Path) -> None:
    """A weight that is sparse in blocks already loses what the dense recipe loses; files and copies hold the same."""
    model = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 64)).requires_grad_(False)
    for index in (0, 2):
        model[index].weight.copy_(prune_blocks(model[index].weight, 32, 0.75))
    recipe, dense = qtorch.block_sparse(base, sparsity=0.75, block_size=32), copy.deepcopy(model)
    x = torch.randn(5, 256)
    y = model(x)
    report = quantize_(model, recipe)
    quantize_(dense, base)
    assert all(row.kernel.find("block_sparse") >= 0 for row in report.quantized)
    assert model[0].weight.nbytes < 0.3 * dense[0].weight.nbytes
    assert torch.equal(model[0].weight.dequantize(), dense[0].weight.dequantize())
    assert compute_error(dense(x), model(x)) > 60
    assert compute_error(y, dense(x)) - 1 < compute_error(y, model(x)) < 60
    save_quantized(model, tmp_path / "model")
    loaded = load_quantized(nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 64)), tmp_path / "model")
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
        assert torch.equal(other[0].weight.columns, model[0].weight.columns)


@pytest.mark.parametrize("base", [*BASES[1:3], None], ids=str)
def test_pruning_on_data_loses_less(base: WeightRecipe | None) -> None:
    """By the second moment of the inputs, with what remains making up for what is dropped."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).requires_grad_(False)
    mixed = torch.randn(64, 64) * torch.logspace(0, -2, 64)
    batches, x = [torch.randn(64, 64) @ mixed for _ in range(4)], torch.randn(128, 64) @ mixed
    recipe = INT8 if base is None else qtorch.block_sparse(base, sparsity=0.5, block_size=32)
    errors = []
    for used in (recipe, gptq(recipe, batches), calibrated(recipe, batches, refine=[Descent(), ScaleRefit()])):
        quantized = copy.deepcopy(model)
        report = quantize_(quantized, used)
        errors.append(float((quantized(x) - model(x)).norm() / model(x).norm()))
    assert report.quantized[0].calibration.method == "prune + gptq + descent + scalerefit"
    assert 0.01 < errors[2] < errors[1] < 0.9 * errors[0]
    if base is None:
        assert is_2_4(quantized[0].weight.dequantize())


def test_what_cannot_be_sparse_in_blocks() -> None:
    assert pruning.kept_blocks(4, 0.6) == 2
    for base, message in (
        (qtorch.int8_static_activation_int8_weight(0.1), "static activation"),
        (INT8, "or its like, got int8_dynamic_activation_int8_semi_sparse_weight"),
        (qtorch.int4_weight_only(group_size=32), "without zero point"),
        (qtorch.block_sparse(qtorch.int8_weight_only()), "or its like, got block_sparse"),
    ):
        refuses(message, lambda base=base: qtorch.block_sparse(base))
    with pytest.raises(ValueError, match=r"semi_sparse_weight: granularity is PerRow\(\) or PerTensor\(\), got PerG"):
        qtorch.float8_dynamic_activation_float8_semi_sparse_weight(qtorch.PerGroup(32))
    with pytest.raises(ValueError, match="blocks of 64 x 64 do not divide a weight"):
        quantize_(nn.Linear(96, 64), qtorch.block_sparse(qtorch.int8_weight_only()))
