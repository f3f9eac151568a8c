"""What holds for every registered recipe: what it refuses, and that an emulated product is said."""

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import PerGroup, explain, quantize_
from qtorch.kernels import FallbackError, record_kernels, registry
from qtorch.recipes.base import RECIPES
from tests.every_recipe import NAMES, WEIGHT_ONLY, has_group_size, make
from tests.quantize_model import same, state_of

GROUPED = [name for name in NAMES if isinstance(make(name, 32).linear_spec().weight.granularity, PerGroup)]
EMULATED = [
    name for name in NAMES if name not in WEIGHT_ONLY and make(name).linear_spec().activation.dtype.is_floating_point
]
every_recipe = pytest.mark.parametrize("name", NAMES)

N, K = 64, 256
ROWS, GROUPS = N, N * K // 32

# Bytes of a (N, K) weight in bf16, in groups of 32 where there are groups: codes, scales, and what comes beside them.
BYTES = {
    "int8_weight_only": N * K + 4 * ROWS,
    "int8_dynamic_activation_int8_weight": N * K + 4 * ROWS,
    "int8_static_activation_int8_weight": N * K + 4 * ROWS + 4,
    "int8_dynamic_activation_int8_semi_sparse_weight": N * K * 5 // 8 + 4 * ROWS,
    "float8_weight_only": N * K + 4 * ROWS,
    "float8_dynamic_activation_float8_weight": N * K + 4 * ROWS,
    "float8_static_activation_float8_weight": N * K + 4 + 4,
    "float8_dynamic_activation_float8_semi_sparse_weight": N * K * 5 // 8 + 4 * ROWS,
    "int4_weight_only": N * K // 2 + (2 + 1) * GROUPS,
    "int8_dynamic_activation_int4_weight": N * K // 2 + 2 * GROUPS,
    "float8_dynamic_activation_int4_weight": N * K // 2 + 2 * GROUPS,
    "uintx_weight_only": N * K * 3 // 8 + (2 + 1) * GROUPS,
    "intx_weight_only": N * K * 5 // 8 + 2 * GROUPS,
    "fpx_weight_only": N * K * 6 // 8 + 4 * ROWS,
    "mxfp8_weight_only": N * K + GROUPS,
    "mxfp8_dynamic_activation_mxfp8_weight": N * K + GROUPS,
    "mxfp6_weight_only": N * K * 6 // 8 + GROUPS,
    "mxfp4_weight_only": N * K // 2 + GROUPS,
    "mxfp4_dynamic_activation_mxfp4_weight": N * K // 2 + GROUPS,
    "nvfp4_weight_only": N * K // 2 + N * K // 16 + 4,
    "nvfp4_dynamic_activation_nvfp4_weight": N * K // 2 + N * K // 16 + 4,
    "nf4_weight_only": N * K // 2 + GROUPS + 4 * (GROUPS // 256) + 4 + 16 * 4,
    "lut_weight_only": N * K // 2 + (2 + 16 * 2) * GROUPS,
}


def model(first: int, second: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(first, 8, dtype=dtype), nn.ReLU(), nn.Linear(second, 8, dtype=dtype))


@every_recipe
def test_bytes_are_those_of_the_formula(name: str) -> None:
    layer = nn.Linear(K, N, dtype=torch.bfloat16)
    report = quantize_(layer, make(name, 32))
    # A recipe that is not of qtorch has no formula here.
    assert layer.weight.nbytes == report.bytes_after == BYTES.get(name, report.bytes_after)
    assert name in BYTES or not RECIPES[name].__module__.startswith("qtorch.")


@pytest.mark.parametrize("name", GROUPED)
def test_groups_that_do_not_divide_the_row(name: str) -> None:
    """An error for the layer that does not fit, of its sizes, before the one that does is changed."""
    recipe, layers = make(name, 32), model(64, 72)
    before, size = state_of(layers), recipe.linear_spec().weight.granularity.group_size
    with pytest.raises(ValueError, match=r"^quantize_: ") as error:
        quantize_(layers, recipe)
    what, unchanged, entry = str(error.value).splitlines()
    assert what == f"quantize_: 2: block_size (1, {size}) does not divide shape (8, 72): 72 % {size} along axis 1"
    assert unchanged.startswith("the model is unchanged; on_misfit=")
    assert entry.startswith(f'"2": {name}(' if has_group_size(recipe) else '"2": None,')
    assert same(before, state_of(layers))


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(GROUPED)))
def test_without_groups_any_row_will_do(name: str) -> None:
    assert len(quantize_(model(67, 1), make(name)).quantized) == 2


def test_some_recipes_have_groups_and_some_do_not() -> None:
    assert {"int4_weight_only", "lut_weight_only", "mxfp4_weight_only"} <= set(GROUPED)
    assert {"int8_weight_only", "fpx_weight_only"} <= set(NAMES) - set(GROUPED)


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_weights_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    layers = model(64, 64)
    layers[2].weight = nn.Parameter(layers[2].weight.detach().to(dtype), requires_grad=False)
    before = state_of(layers)
    message = f"quantize_: 2: takes float32, float16 or bfloat16 weights, this one is {dtype}\nthe model is unchanged"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        quantize_(layers, make(name, 32))
    assert same(before, state_of(layers))


@every_recipe
@pytest.mark.parametrize("weight", [torch.tensor(1.0), torch.randn(64)], ids=["0-d", "1-d"])
def test_weights_that_are_no_matrix(name: str, weight: Tensor) -> None:
    message = re.escape(f"takes weights of two or more dimensions, this one has shape {tuple(weight.shape)}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        make(name, 32).check(weight)


@pytest.mark.parametrize("name", EMULATED)
def test_an_emulation_is_said_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_reported", set())
    layers, x = model(64, 8), torch.randn(3, 64)
    report = quantize_(layers, {"0": make(name, 32)})
    kernel = "emulated_semi_sparse_mm" if "semi_sparse" in name else "emulated_scaled_mm"
    assert report.quantized[0].kernel == kernel
    note = explain(layers)[0].note
    assert note.startswith("emulated in fp32: the accuracy of the format, not its speed")
    with warnings.catch_warnings(record=True) as caught, record_kernels() as ran:
        warnings.simplefilter("always")
        for _ in range(3):
            layers(x)
            layers[0](x[:1])
    assert ran.count(f"linear:{kernel}") == 6
    (message,) = [str(warning.message) for warning in caught if "qtorch" in str(warning.message)]
    spec = layers[0].weight.scheme.spec
    assert message == (
        f"qtorch: linear on a cpu float32 input with {spec}, layout {spec.layout} runs {kernel}, {note}; "
        "qtorch.explain says why no other kernel does"
    )
    with qtorch.config.patch(strict=True), pytest.raises(FallbackError, match=f"runs {kernel}"):
        layers(x)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(EMULATED)))
def test_no_other_recipe_falls_back(name: str) -> None:
    """Weight-only float8 needs no hardware."""
    layers = model(64, 8)
    quantize_(layers, {"0": make(name, 32)})
    with qtorch.config.patch(strict=True):
        layers(torch.randn(3, 64))


def test_the_float8_recipes_are_among_the_emulated() -> None:
    assert {
        "float8_dynamic_activation_float8_weight",
        "float8_static_activation_float8_weight",
        "float8_dynamic_activation_int4_weight",
    } <= set(EMULATED)
