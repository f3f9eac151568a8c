"""What holds for every recipe: its value, numbers, size and kernel, files old and new, graphs, and what it refuses."""

import copy
import dataclasses
import json
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._dynamo.utils import counters

import qtorch
from qtorch import AffineQuantizedTensor, compute_error, explain, load_quantized, quantize_, save_quantized
from qtorch.kernels import FallbackError, record_kernels, registry
from qtorch.kernels.linear import reference
from qtorch.primitives import MSERule, RotatedSpec, from_json, to_json
from qtorch.recipes.base import RECIPES, WeightRecipe
from tests import fast_part, quantize_model
from tests.every_recipe import FAMILIES, NAMES, WEIGHT_ONLY, has_group_size, make
from tests.golden.make import FOLDER, GOLDEN, layer_and_input
from tests.refusals import refuses
from tests.rounding import EXTRA, gamma

FLOAT, SYMMETRIC, ASYMMETRIC = qtorch.ZeroPointDomain.FLOAT, qtorch.MappingType.SYMMETRIC, qtorch.MappingType.ASYMMETRIC

# Recipe, kernel of torch operators, SQNR in dB of a Gaussian weight (64, 256), bits per weight where the model is bf16.
CASES = [
    (qtorch.int8_weight_only(), "weight_only_mm", 43.2, 8.125),
    (qtorch.int8_weight_only(scale_rule=MSERule(steps=5)), "weight_only_mm", 43.2, 8.125),
    (qtorch.int8_weight_only(group_size=32), "weight_only_mm", 45.5, 8.5),
    (qtorch.int4_weight_only(), "packed_weight_mm", 19.9, 4.1875),
    (qtorch.int4_weight_only(32), "packed_weight_mm", 21.9, 4.75),
    (qtorch.int4_weight_only(-1, FLOAT), "packed_weight_mm", 19.3, 4.125),
    (qtorch.int4_weight_only(32, use_hqq=True), "packed_weight_mm", 22.2, 4.75),
    (qtorch.int4_weight_only(32, FLOAT, use_hqq=True), "packed_weight_mm", 22.9, 5),
    (qtorch.int8_weight_only(group_size=32, double_quantize=True), "weight_only_mm", 45.4, 8.255859375),
    (qtorch.int4_weight_only(32, double_quantize=True), "packed_weight_mm", 21.9, 4.505859375),
    (qtorch.uintx_weight_only("uint2", 32, double_quantize=True), "packed_weight_mm", 8.0, 2.505859375),
    (qtorch.intx_weight_only("int3", 32, double_quantize=True), "packed_weight_mm", 14.0, 3.255859375),
    (qtorch.int8_dynamic_activation_int4_weight(double_quantize=True), "packed_int8_scaled_mm", 20.4, 4.255859375),
    (qtorch.int8_dynamic_activation_int8_weight(), "int8_scaled_mm", 43.2, 8.125),
    (qtorch.int8_dynamic_activation_int8_weight(ASYMMETRIC), "int8_scaled_mm", 43.2, 8.125),
    (qtorch.int8_dynamic_activation_int4_weight(), "packed_int8_scaled_mm", 20.4, 4.5),
    (qtorch.int8_dynamic_activation_int4_weight(64, ASYMMETRIC, SYMMETRIC), "packed_int8_scaled_mm", 20.9, 4.375),
    (qtorch.int8_static_activation_int8_weight(0.03), "int8_scaled_mm", 43.2, 8.126953125),
    *(
        (qtorch.uintx_weight_only(f"uint{bits}"), "packed_weight_mm", sqnr, bits + 0.375)
        for bits, sqnr in enumerate((0.2, 6.8, 14.2, 20.9, 27.1, 33.3, 39.4), 1)
    ),
    (qtorch.uintx_weight_only("uint2", 32, use_hqq=True), "packed_weight_mm", 9.6, 2.75),
    (qtorch.uintx_weight_only("uint2", 32, zero_point_domain=FLOAT, use_hqq=True), "packed_weight_mm", 10.4, 3),
    (qtorch.uintx_weight_only("uint3", 32, zero_point_domain=FLOAT, use_hqq=True), "packed_weight_mm", 16.6, 4),
    *(
        (qtorch.intx_weight_only(f"int{bits}"), "packed_weight_mm", sqnr, bits + 0.25)
        for bits, sqnr in enumerate((5.8, 13.1, 19.8, 26.1, 32.2, 38.3), 2)
    ),
    (qtorch.intx_weight_only("int3", 32, use_hqq=True), "packed_weight_mm", 15.0, 3.5),
    (qtorch.intx_weight_only("int2", 32, ASYMMETRIC, use_hqq=True), "packed_weight_mm", 9.6, 2.75),
    (qtorch.nf4_weight_only(), "lut_weight_mm", 20.8, 4.16015625),
    (qtorch.nf4_weight_only(32, False), "lut_weight_mm", 21.2, 4.53125),
    (qtorch.lut_weight_only(), "lut_weight_mm", 21.6, 5.125),
    (qtorch.lut_weight_only(3, 64), "lut_weight_mm", 16.6, 5.25),
    (qtorch.lut_weight_only(2), "lut_weight_mm", 9.6, 2.375),
    (qtorch.vector_codebook_weight_only(), "vector_codebook_mm", 10.1, 2.0625),
    (qtorch.vector_codebook_weight_only(64), "vector_codebook_mm", 10.1, 2.25),
    (qtorch.float8_weight_only(), "weight_only_mm", 31.7, 8.125),
    (qtorch.float8_weight_only(torch.float8_e5m2), "weight_only_mm", 25.6, 8.125),
    (qtorch.float8_dynamic_activation_float8_weight(), "emulated_scaled_mm", 31.7, 8.125),
    (qtorch.float8_dynamic_activation_float8_weight(qtorch.PerTensor()), "emulated_scaled_mm", 31.5, 8.001953125),
    (qtorch.float8_static_activation_float8_weight(0.01), "emulated_scaled_mm", 31.5, 8.00390625),
    (
        qtorch.float8_static_activation_float8_weight(0.01, granularity=qtorch.PerRow()),
        "emulated_scaled_mm",
        31.7,
        8.126953125,
    ),
    (qtorch.float8_dynamic_activation_int4_weight(32), "emulated_scaled_mm", 20.4, 4.5),
    (qtorch.float8_dynamic_activation_int4_weight(-1, torch.float8_e5m2), "emulated_scaled_mm", 18.6, 4.0625),
    *(
        (qtorch.fpx_weight_only(e, m), "packed_weight_mm", sqnr, 1.125 + e + m)
        for e, m, sqnr in ((3, 2, 25.6), (2, 3, 31.4), (2, 2, 25.2), (3, 1, 19.8), (2, 1, 19.1), (2, 0, 12.1))
    ),
    (qtorch.gguf_q8_0(), "weight_only_mm", 45.0, 8.5),
    *(
        (getattr(qtorch, f"gguf_{kind}")(), "packed_weight_mm", sqnr, bits)
        for kind, sqnr, bits in zip(
            ("q5_0", "q5_1", "q4_0", "q4_1", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k"),
            (28.2, 28.4, 22.1, 22.3, 33.8, 28.2, 22.0, 14.7, 9.6),
            (5.5, 6, 4.5, 5, 6.5625, 5.625, 4.625, 3.5625, 3.125),
        )
    ),
    (qtorch.gguf_iq4_nl(), "lut_weight_mm", 22.3, 4.53125),
    (qtorch.mxfp8_weight_only(), "weight_only_mm", 30.6, 8.25),
    (qtorch.mxfp6_weight_only(), "packed_weight_mm", 30.9, 6.25),
    (qtorch.mxfp4_weight_only(), "packed_weight_mm", 18.8, 4.25),
    (qtorch.mxfp8_dynamic_activation_mxfp8_weight(), "emulated_scaled_mm", 30.6, 8.25),
    (qtorch.mxfp4_dynamic_activation_mxfp4_weight(), "emulated_scaled_mm", 18.8, 4.25),
    (qtorch.nvfp4_weight_only(), "packed_weight_mm", 20.4, 4.501953125),
    (qtorch.nvfp4_dynamic_activation_nvfp4_weight(), "emulated_scaled_mm", 20.4, 4.501953125),
    (qtorch.int8_dynamic_activation_int8_semi_sparse_weight(), "semi_sparse_int8_scaled_mm", 8.8, 5.125),
    (qtorch.int8_dynamic_activation_int8_semi_sparse_weight(ASYMMETRIC), "semi_sparse_int8_scaled_mm", 8.8, 5.125),
    (qtorch.float8_dynamic_activation_float8_semi_sparse_weight(), "emulated_semi_sparse_mm", 8.8, 5.125),
    (
        qtorch.float8_dynamic_activation_float8_semi_sparse_weight(qtorch.PerTensor()),
        "emulated_semi_sparse_mm",
        8.8,
        5.001953125,
    ),
]
every_case = pytest.mark.parametrize(("recipe", "kernel", "sqnr", "bits"), CASES, ids=[str(case[0]) for case in CASES])

GROUPED = [name for name in NAMES if isinstance(make(name, 32).linear_spec().weight.granularity, qtorch.PerGroup)]
EMULATED = [n for n in NAMES if n not in WEIGHT_ONLY and make(n).linear_spec().activation.dtype.is_floating_point]
FLOAT8 = ("dynamic_activation_float8", "static_activation_float8", "dynamic_activation_int4")
every_recipe = pytest.mark.parametrize("name", NAMES)


def model(first: int, second: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(first, 8, dtype=dtype), nn.ReLU(), nn.Linear(second, 8, dtype=dtype))


def test_every_recipe_has_a_case() -> None:
    assert {recipe.name for recipe, *_ in CASES} >= {name for name in NAMES if hasattr(qtorch, name)}
    assert len({str(recipe) for recipe, *_ in CASES}) == len({recipe for recipe, *_ in CASES}) == len(CASES)
    assert {"int4_weight_only", "lut_weight_only", "mxfp4_weight_only"} <= set(GROUPED)
    assert {"int8_weight_only", "fpx_weight_only"} <= set(NAMES) - set(GROUPED)
    assert {f"float8_{kind}_weight" for kind in FLOAT8} <= set(EMULATED)
    assert set(GOLDEN_NAMES) == set(GOLDEN)
    # A dynamic form stores the same weight as the weight-only one.
    dynamic = {f"{name}_dynamic_activation_{name}_weight" for name in ("mxfp8", "mxfp4", "nvfp4")}
    assert {recipe.name for recipe in GOLDEN.values()} | dynamic == {
        name for name, cls in RECIPES.items() if cls.__module__.startswith("qtorch.recipes")
    }


@every_case
def test_is_a_value(recipe: WeightRecipe, kernel: str, sqnr: float, bits: float) -> None:
    """Frozen, comparable, hashable, JSON; and its name is the function's in all places."""
    for twin in (dataclasses.replace(recipe), from_json(json.loads(json.dumps(to_json(recipe))))):
        assert recipe == twin
        assert hash(recipe) == hash(twin)
    for field in dataclasses.fields(recipe)[:1]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(recipe, field.name, None)
    name = recipe.name
    assert getattr(qtorch.quantize_api, name) is getattr(qtorch, name) is getattr(qtorch.recipes, name) is type(recipe)
    assert str(recipe).startswith(f"{name}(")


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_case
def test_numbers(recipe: WeightRecipe, kernel: str, sqnr: float, bits: float, dtype: torch.dtype) -> None:
    """The weight is as good as the format is; the layer computes what the reference does, and with it the gradient."""
    layer = nn.Linear(256, 64, dtype=dtype)
    nn.init.normal_(layer.weight)
    x = torch.randn(5, 256, dtype=dtype, requires_grad=True)
    weight, y = layer.weight.detach().clone(), layer(x).detach()
    (row,) = quantize_(layer, recipe).quantized
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad
    assert layer.weight.dtype == dtype
    assert abs(compute_error(weight, layer.weight.dequantize()) - sqnr) < 1
    assert abs(row.sqnr - sqnr) < 1
    if dtype.itemsize == 2:
        assert row.bytes_after * 8 == bits * weight.numel()
    with record_kernels() as ran:
        z = layer(x)
    assert z.dtype == dtype
    assert ran[0] == f"linear:{row.kernel}" != "linear:reference"
    assert row.kernel == kernel or dtype.itemsize == 2
    # Activations of 4 bits lose 4 dB more.
    assert sqnr - 5 < compute_error(y, z) < sqnr + 1.5
    assert compute_error(reference.linear(x, layer.weight, layer.bias), z) > (100 if dtype == torch.float32 else 35)
    (gradient,) = torch.autograd.grad(z.sum(), x)
    expected = layer.weight.dequantize().sum(0).expand(5, -1)
    assert compute_error(expected, gradient) > (100 if dtype == torch.float32 else 30)


@every_case
def test_save_load_and_copy(recipe: WeightRecipe, kernel: str, sqnr: float, bits: float, tmp_path: Path) -> None:
    layer, x = nn.Linear(256, 32), torch.randn(3, 256)
    quantize_(layer, recipe)
    save_quantized(layer, tmp_path / "layer.safetensors")
    with torch.device("meta"):
        loaded, assigned = nn.Linear(256, 32), nn.Linear(256, 32)
    load_quantized(loaded, tmp_path / "layer.safetensors")
    assigned.load_state_dict(layer.state_dict(), assign=True)
    for other in (loaded, assigned, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.weight.scheme == layer.weight.scheme
        assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", fast_part.slow_but(FAMILIES, NAMES))
def test_compile_traces_one_graph(name: str, grad: bool) -> None:
    recipe = make(name, 32)
    if grad and recipe.linear_spec().activation is None:
        pytest.skip("as weight-only recipes without a gradient")
    layers = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    quantize_(layers, recipe)
    compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend="aot_eager")
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True), torch.set_grad_enabled(grad):
        for batch in (7, 3, 33):
            x = torch.randn(batch, 64, requires_grad=grad)
            eager, y = layers(x), compiled(x)
            assert compute_error(eager, y) > 90
            if grad:
                for one, other in zip(*(torch.autograd.grad(out.sum(), [x, layers[0].bias]) for out in (eager, y))):
                    assert compute_error(one, other) > 90
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


INDUCTOR = ["int8_weight_only", "int4_weight_only", "int8_dynamic_activation_int8_weight", "lut_weight_only"]
INDUCTOR += ["int8_dynamic_activation_int4_weight", "int8_dynamic_activation_int8_semi_sparse_weight"]
INDUCTOR += ["float8_dynamic_activation_float8_semi_sparse_weight", "float8_dynamic_activation_float8_weight"]


@pytest.mark.slow
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor(name: str) -> None:
    layers, x = model(64, 8, torch.bfloat16), torch.randn(5, 64, dtype=torch.bfloat16)
    quantize_(layers, {"0": make(name, 32)})
    compiled = torch.compile(layers, fullgraph=True, dynamic=True)
    with torch.no_grad():
        y = layers(x)
        compiled(x)
        with record_kernels() as ran:
            z = compiled(x)
    assert any("semi_sparse" in kernel for kernel in ran) == ("semi_sparse" in name)
    # A code may round the other way after a fused multiplication.
    assert compute_error(y, z) > 25


@every_recipe
def test_floats_that_are_not_in_the_order_of_rows(name: str) -> None:
    """Codes are, whatever the order of the floats in memory, so that kernels read them and files give them back."""
    layer = nn.Linear(256, 64)
    other = copy.deepcopy(layer)
    other.weight = nn.Parameter(other.weight.detach().t().contiguous().t())
    for each in (layer, other):
        quantize_(each, make(name))
    for part in layer.weight.__tensor_flatten__()[0]:
        assert torch.equal(getattr(layer.weight, part), getattr(other.weight, part))
        assert getattr(layer.weight, part).stride() == getattr(other.weight, part).stride()


@every_recipe
def test_zero_row_stays_zero(name: str) -> None:
    weight = torch.randn(4, 128)
    weight[2] = 0
    assert bool((make(name, 32).apply(weight).dequantize()[2] == 0).all())


@pytest.mark.parametrize("name", GROUPED)
def test_groups_that_do_not_divide_the_row(name: str) -> None:
    """An error for the layer that does not fit, of its sizes, before the one that does is changed."""
    recipe, layers = make(name, 32), model(64, 72)
    before, size = quantize_model.state_of(layers), recipe.linear_spec().weight.granularity.group_size
    with pytest.raises(ValueError, match=r"^quantize_: ") as error:
        quantize_(layers, recipe)
    what, unchanged, entry = str(error.value).splitlines()
    assert what == f"quantize_: 2: block_size (1, {size}) does not divide shape (8, 72): 72 % {size} along axis 1"
    word = "coarser" if has_group_size(recipe) else "pad"
    assert unchanged.startswith(f'the model is unchanged; on_misfit="{word}" accepts them; ')
    assert entry.startswith(f'"2": {name}(' if has_group_size(recipe) else '"2": None,')
    assert quantize_model.same(before, quantize_model.state_of(layers))
    assert len(quantize_(layers, recipe, on_misfit=word).quantized) == 2


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(GROUPED)))
def test_without_groups_any_row_will_do(name: str) -> None:
    assert len(quantize_(model(67, 1), make(name)).quantized) == 2


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_weights_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    layers = model(64, 64)
    layers[2].weight = nn.Parameter(layers[2].weight.detach().to(dtype), requires_grad=False)
    before = quantize_model.state_of(layers)
    message = f"quantize_: 2: takes float32, float16 or bfloat16 weights, this one is {dtype}\nthe model is unchanged"
    refuses(f"^{re.escape(message)}$", lambda: quantize_(layers, make(name, 32)))
    assert quantize_model.same(before, quantize_model.state_of(layers))


@every_recipe
@pytest.mark.parametrize("weight", [torch.tensor(1.0), torch.randn(64)], ids=["0-d", "1-d"])
def test_weights_that_are_no_matrix(name: str, weight: Tensor) -> None:
    message = re.escape(f"takes weights of two or more dimensions, this one has shape {tuple(weight.shape)}")
    refuses(f"^{message}$", lambda: make(name, 32).check(weight))


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


GOLDEN_NAMES = sorted(path.name.removesuffix(".numbers.safetensors") for path in FOLDER.glob("*.numbers.safetensors"))


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_loads_and_gives_the_same_numbers(name: str) -> None:
    numbers = load_file(FOLDER / f"{name}.numbers.safetensors")
    with torch.device("meta"):
        layer, _ = layer_and_input(name)
    load_quantized(layer, FOLDER / f"{name}.safetensors")
    weight, rows = layer.weight.dequantize(), numbers["weight"].flatten(1).double()
    # Sums of floats may be added up in another order on another processor. A rotated weight is such a sum, of products
    # whose magnitudes add up to the norm of its row at most; others are the same bits.
    if isinstance(layer.weight, AffineQuantizedTensor) and isinstance(layer.weight.scheme.weight, RotatedSpec):
        atol = 2 * gamma(rows.shape[1] + EXTRA) * float(rows.norm(dim=1).max())
        torch.testing.assert_close(weight, numbers["weight"], rtol=0, atol=atol)
    else:
        assert torch.equal(weight, numbers["weight"])
    output = layer(numbers["input"])
    # What is summed is as large as the largest input times the sum of a row's weights; in bf16, weights and results are
    # rounded too.
    rows = rows.abs().sum(1)
    size = float(numbers["input"].double().abs().max() * rows.max() + layer.bias.double().abs().max())
    terms = numbers["weight"][0].numel() + EXTRA
    atol = 2 * (gamma(terms) + (2 * gamma(1, torch.bfloat16) if output.dtype == torch.bfloat16 else 0)) * size
    torch.testing.assert_close(output, numbers["output"], rtol=0, atol=atol)
