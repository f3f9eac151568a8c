"""The recipes: as values, as numbers, and under torch.compile."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.utils import counters

import qtorch
from qtorch import (
    LinearSpec,
    MappingType,
    PerBlock,
    QuantSpec,
    ZeroPointDomain,
    compute_error,
    int4_weight_only,
    int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    quantize_,
)
from qtorch.primitives import MSERule, from_json, to_json
from qtorch.recipes.base import RECIPES, Recipe, WeightRecipe, register_recipe

DEFAULTS = [
    int8_weight_only(),
    int4_weight_only(group_size=32),
    int8_dynamic_activation_int8_weight(),
    int8_dynamic_activation_int4_weight(),
]
VARIANTS = [
    *DEFAULTS,
    int8_weight_only(scale_rule=MSERule(steps=5)),
    int4_weight_only(group_size=-1, zero_point_domain=ZeroPointDomain.FLOAT),
    int8_dynamic_activation_int8_weight(MappingType.ASYMMETRIC),
    int8_dynamic_activation_int4_weight(64, MappingType.ASYMMETRIC, MappingType.SYMMETRIC),
]
# (lowest, highest) SQNR in dB of a Gaussian weight.
WEIGHT_SQNR = {
    "int8_weight_only": (38, 50),
    "int4_weight_only": (18, 25),
    "int8_dynamic_activation_int8_weight": (38, 50),
    "int8_dynamic_activation_int4_weight": (17, 25),
}

every_variant = pytest.mark.parametrize("recipe", VARIANTS, ids=str)
every_default = pytest.mark.parametrize("recipe", DEFAULTS, ids=str)


def quantized(recipe: Recipe, shape: tuple[int, ...] = (64, 128), dtype: torch.dtype = torch.float32) -> Tensor:
    return recipe.apply(torch.randn(shape, dtype=dtype))


def mlp(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))


def test_every_recipe_is_tested() -> None:
    """A recipe that someone adds has to be called in tests/test_*recipes.py."""
    builtin = {name for name, cls in RECIPES.items() if cls.__module__.startswith("qtorch.recipes")}
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*recipes.py"))
    assert [name for name in builtin if f"{name}(" not in tests] == []


@every_variant
def test_is_a_frozen_comparable_hashable_value(recipe: Recipe) -> None:
    twin = dataclasses.replace(recipe)
    assert recipe == twin
    assert hash(recipe) == hash(twin)
    field = dataclasses.fields(recipe)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(recipe, field, None)


def test_all_variants_differ() -> None:
    assert len(set(VARIANTS)) == len(VARIANTS)
    assert len({str(recipe) for recipe in VARIANTS}) == len(VARIANTS)


@every_variant
def test_json_round_trip(recipe: Recipe) -> None:
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe


def test_json_spells_out_every_field() -> None:
    assert_expected_inline(
        json.dumps(to_json(int4_weight_only())),
        """{"type": "Int4WeightOnly", "group_size": 128, "zero_point_domain": "ZeroPointDomain.INT", "scale_rule": {"type": "MinMaxRule"}, "layout": {"type": "PackedLayout", "axis": -1}, "use_hqq": false}""",  # noqa: E501
    )


def test_str_is_the_call_without_defaults() -> None:
    assert_expected_inline(
        "\n".join(map(str, VARIANTS)),
        """\
int8_weight_only()
int4_weight_only(group_size=32)
int8_dynamic_activation_int8_weight()
int8_dynamic_activation_int4_weight()
int8_weight_only(scale_rule=MSERule(steps=5, smallest=0.5))
int4_weight_only(group_size=-1, zero_point_domain=FLOAT)
int8_dynamic_activation_int8_weight(act_mapping_type=ASYMMETRIC)
int8_dynamic_activation_int4_weight(group_size=64, mapping_type=ASYMMETRIC, act_mapping_type=SYMMETRIC)""",
    )


@pytest.mark.parametrize("name", WEIGHT_SQNR)
def test_names(name: str) -> None:
    assert getattr(qtorch.quantize_api, name) is getattr(qtorch, name) is getattr(qtorch.recipes, name)
    assert str(getattr(qtorch, name)()) == f"{name}()"


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"'qtorch\.quantize_api' has no attribute 'int3_weight_only'"):
        _ = qtorch.quantize_api.int3_weight_only


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'int8_weight_only' is taken"):
        register_recipe("int8_weight_only")(dataclasses.dataclass(frozen=True)(type("Mine", (WeightRecipe,), {})))


@pytest.mark.parametrize("group_size", [0, -2])
def test_a_wrong_argument_fails_in_the_call(group_size: int) -> None:
    with pytest.raises(ValueError, match=f"group_size is {group_size}; it must be positive, or -1"):
        int4_weight_only(group_size=group_size)
    with pytest.raises(ValueError, match="needs a zero point: zero_point_domain is NONE"):
        int4_weight_only(zero_point_domain=ZeroPointDomain.NONE)


@every_variant
def test_codes(recipe: Recipe) -> None:
    codes, scale, zero_point = quantized(recipe).plain()
    low, high = {"int8": (-127, 127), "int4": (-8, 7), "uint4": (0, 15)}[recipe.linear_spec().weight.dtype.name]
    lowest, highest = int(codes.min()), int(codes.max())
    assert low <= lowest < highest <= high
    # The whole range is used: half of it would lose a bit without any other test noticing.
    assert highest - lowest >= 0.9 * (high - low)
    assert codes.dtype == (torch.uint8 if low == 0 else torch.int8)
    assert bool((scale > 0).all())
    assert (zero_point is not None) == (recipe.linear_spec().weight.mapping is MappingType.ASYMMETRIC)


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        (int8_weight_only(), (64, 1)),
        (int8_dynamic_activation_int8_weight(), (64, 1)),
        (int4_weight_only(), (64, 2)),
        (int4_weight_only(group_size=32), (64, 8)),
        (int4_weight_only(group_size=-1), (64, 1)),
        (int8_dynamic_activation_int4_weight(), (64, 8)),
        (int8_dynamic_activation_int4_weight(group_size=256), (64, 1)),
    ],
    ids=str,
)
def test_scale_shape(recipe: Recipe, shape: tuple[int, int]) -> None:
    assert quantized(recipe, (64, 256)).plain()[1].shape == shape
    assert quantized(recipe, (3, 64, 256)).plain()[1].shape == (3, *shape)


@every_default
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weight_error(recipe: Recipe, dtype: torch.dtype) -> None:
    weight = torch.randn(128, 256, dtype=dtype)
    result = recipe.apply(weight)
    assert result.dtype == dtype
    low, high = WEIGHT_SQNR[recipe.name]
    assert low < compute_error(weight, result.dequantize()) < high


@every_default
def test_zero_row_stays_zero(recipe: Recipe) -> None:
    weight = torch.randn(4, 128)
    weight[2] = 0
    assert bool((recipe.apply(weight).dequantize()[2] == 0).all())


@pytest.mark.parametrize(
    ("recipe", "bits"),
    # Codes at their true size, and scales: 32 bits a row, 16 bits a group with a byte of zero point.
    [
        (int8_weight_only(), 8 + 32 / 512),
        (int8_dynamic_activation_int8_weight(), 8 + 32 / 512),
        (int4_weight_only(group_size=64), 4 + 24 / 64),
        (int8_dynamic_activation_int4_weight(), 4 + 16 / 32),
    ],
    ids=str,
)
def test_size(recipe: Recipe, bits: float) -> None:
    weight = torch.randn(256, 512, dtype=torch.bfloat16)
    assert recipe.apply(weight).nbytes * 8 == bits * weight.numel()


@every_default
def test_weights_are_frozen(recipe: Recipe) -> None:
    model = mlp()
    quantize_(model, recipe)
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad


@every_default
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_compile_traces_one_graph(recipe: Recipe, grad: bool) -> None:
    run_compiled(recipe, grad, "aot_eager", torch.float32)


@pytest.mark.slow
@every_default
def test_inductor(recipe: Recipe) -> None:
    run_compiled(recipe, False, "inductor", torch.bfloat16)


def run_compiled(recipe: Recipe, grad: bool, backend: str, dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    quantize_(model, recipe)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    counters.clear()
    low = 35 if dtype is torch.bfloat16 else 100
    with torch._dynamo.config.patch(error_on_recompile=True), torch.set_grad_enabled(grad):
        for batch in (7, 3, 33):
            x = torch.randn(batch, 64, dtype=dtype, requires_grad=grad)
            eager, y = model(x), compiled(x)
            assert y.dtype == dtype
            assert compute_error(eager, y) > low
            if grad:
                inputs = [x, model[0].bias]
                for wanted, got in zip(gradients(eager, inputs), gradients(y, inputs)):
                    assert compute_error(wanted, got) > 100
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def gradients(y: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.square().sum(), inputs)


def test_a_recipe_of_ones_own() -> None:
    """Outside code adds a recipe in a few lines."""

    @register_recipe("blocks_for_test")
    @dataclasses.dataclass(frozen=True)
    class Blocks(WeightRecipe):
        size: int = 16

        def linear_spec(self) -> LinearSpec:
            return LinearSpec(QuantSpec(torch.int8, PerBlock((self.size, self.size))))

    try:
        model, x = mlp(), torch.randn(5, 64)
        wanted = model(x)
        report = quantize_(model, qtorch.quantize_api.blocks_for_test(32))
        assert report.quantized[0].detail == "blocks_for_test(size=32)"
        assert model[0].weight.plain()[1].shape == (3, 2)
        assert 30 < compute_error(wanted, model(x)) < 50
        assert from_json(to_json(Blocks(8))) == Blocks(8)
    finally:
        del RECIPES["blocks_for_test"]
