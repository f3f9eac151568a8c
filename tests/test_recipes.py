"""What is special of one recipe or family; `test_every_recipe.py` has what holds for all."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import qtorch
from qtorch.kernels import record_kernels
from qtorch.kernels.linear import reference
from qtorch.primitives import HQQRule, MSERule, from_json, to_json
from qtorch.recipes.base import RECIPES, Recipe, WeightRecipe, register_recipe

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")

FLOAT, SYMMETRIC, ASYMMETRIC = qtorch.ZeroPointDomain.FLOAT, qtorch.MappingType.SYMMETRIC, qtorch.MappingType.ASYMMETRIC
TILED = qtorch.TensorCoreTiledLayout()


def mlp(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)).requires_grad_(False)


def test_json_spells_out_every_field() -> None:
    assert_expected_inline(
        json.dumps(to_json(qtorch.int4_weight_only())),
        """{"type": "Int4WeightOnly", "group_size": 128, "zero_point_domain": "ZeroPointDomain.INT", "scale_rule": {"type": "MinMaxRule"}, "layout": {"type": "PackedLayout", "axis": -1}, "use_hqq": false}""",  # noqa: E501
    )


def test_str_is_the_call_without_defaults() -> None:
    made = [
        qtorch.int8_weight_only(),
        qtorch.int8_weight_only(scale_rule=MSERule(steps=5)),
        qtorch.int4_weight_only(-1, FLOAT),
        qtorch.int8_dynamic_activation_int4_weight(64, ASYMMETRIC, SYMMETRIC),
        qtorch.uintx_weight_only(torch.uint3, 32),
        qtorch.int8_static_activation_int8_weight(torch.tensor(0.25)),
    ]
    assert_expected_inline(
        "\n".join(map(str, made)),
        """\
int8_weight_only()
int8_weight_only(scale_rule=MSERule(steps=5, smallest=0.5))
int4_weight_only(group_size=-1, zero_point_domain=FLOAT)
int8_dynamic_activation_int4_weight(group_size=64, mapping_type=ASYMMETRIC, act_mapping_type=SYMMETRIC)
uintx_weight_only(dtype=uint3, group_size=32)
int8_static_activation_int8_weight(scale=0.25)""",
    )


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"'qtorch\.quantize_api' has no attribute 'int3_weight_only'"):
        _ = qtorch.quantize_api.int3_weight_only


def static_float8(**options: Any) -> Recipe:
    return qtorch.float8_static_activation_float8_weight(1.0, **options)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: qtorch.int4_weight_only(group_size=0), "group_size is 0; it must be positive, or -1"),
    (lambda: qtorch.int4_weight_only(group_size=-2), "group_size is -2; it must be positive, or -1"),
    (lambda: qtorch.nf4_weight_only(0), "group_size is 0; it must be positive"),
    (
        lambda: qtorch.int4_weight_only(zero_point_domain=qtorch.ZeroPointDomain.NONE),
        "needs a zero point: zero_point_domain is NONE",
    ),
    (
        lambda: qtorch.int4_weight_only(layout=TILED),
        "takes zero points of the FLOAT domain, the weight has zero_point_domain",
    ),
    (lambda: qtorch.uintx_weight_only(torch.int4), "uintx_weight_only takes uint1 to uint7, got int4"),
    (lambda: qtorch.uintx_weight_only(torch.uint8), "uintx_weight_only takes uint1 to uint7, got uint8"),
    (lambda: qtorch.intx_weight_only("uint4"), "intx_weight_only takes int1 to int7, got uint4"),
    (lambda: qtorch.lut_weight_only(5), "bits is 5; it must be 2, 3 or 4"),
    (lambda: qtorch.fpx_weight_only(3, 3), "float7_e3m3 is not a quantized type"),
    (
        lambda: qtorch.float8_dynamic_activation_float8_weight(qtorch.PerGroup(32)),
        r"PerRow\(\) or PerTensor\(\), got PerGroup",
    ),
    (
        lambda: static_float8(granularity=qtorch.PerGroup(32)),
        r"PerRow\(\) or PerTensor\(\), got PerGroup\(group_size=32\)",
    ),
    (lambda: static_float8(activation_dtype=torch.int8), "float8_weight takes float8_e4m3fn.*, got int8"),
    (lambda: static_float8(weight_dtype=torch.int8), "float8_weight takes float8_e4m3fn.*, got int8"),
    (lambda: qtorch.quantize_(nn.Linear(40, 8), qtorch.mxfp4_weight_only()), "does not divide"),
    (
        lambda: qtorch.quantize_(nn.Linear(48, 8), qtorch.int4_weight_only(-1, FLOAT, layout=TILED)),
        r"takes groups of 32, 64, 128 or 256 along a row, the weight has blocks of \(1, 48\)",
    ),
    (lambda: register_recipe("int8_weight_only")(_Mine), "'int8_weight_only' is taken"),
]


@dataclasses.dataclass(frozen=True)
class _Mine(WeightRecipe):
    pass


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_a_wrong_argument_fails_in_the_call(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        (qtorch.int8_weight_only(), (64, 1)),
        (qtorch.int8_dynamic_activation_int8_weight(), (64, 1)),
        (qtorch.int8_weight_only(group_size=16), (64, 16)),
        (qtorch.int4_weight_only(), (64, 2)),
        (qtorch.int4_weight_only(group_size=-1), (64, 1)),
        (qtorch.int8_dynamic_activation_int4_weight(), (64, 8)),
        (qtorch.int8_dynamic_activation_int4_weight(256, ASYMMETRIC), (64, 1)),
        (qtorch.uintx_weight_only("uint3"), (64, 4)),
    ],
    ids=str,
)
def test_scales_and_codes(recipe: WeightRecipe, shape: tuple[int, int]) -> None:
    weight = recipe.linear_spec().weight
    codes, scale, zero_point = recipe.apply(torch.randn(64, 256)).plain()
    assert scale.shape == shape
    assert recipe.apply(torch.randn(3, 64, 256)).plain()[1].shape == (3, *shape)
    low, high = {"int8": (-127, 127), "int4": (-8, 7), "uint4": (0, 15), "uint3": (0, 7)}[weight.dtype.name]
    lowest, highest = int(codes.min()), int(codes.max())
    assert low <= lowest < highest <= high
    # The whole range is used: half of it would lose a bit without any other test noticing.
    assert highest - lowest >= 0.9 * (high - low)
    assert codes.dtype == (torch.uint8 if low == 0 else torch.int8)
    assert bool((scale > 0).all())
    assert (zero_point is not None) == (weight.mapping is ASYMMETRIC)


def test_a_recipe_of_ones_own() -> None:
    """Outside code adds a recipe in a few lines."""

    @register_recipe("blocks_for_test")
    @dataclasses.dataclass(frozen=True)
    class Blocks(WeightRecipe):
        size: int = 16

        def linear_spec(self) -> qtorch.LinearSpec:
            return qtorch.LinearSpec(qtorch.QuantSpec(torch.int8, qtorch.PerBlock((self.size, self.size))))

    try:
        model, x = mlp(), torch.randn(5, 64)
        wanted = model(x)
        report = qtorch.quantize_(model, qtorch.quantize_api.blocks_for_test(32))
        assert report.quantized[0].detail == "blocks_for_test(size=32)"
        assert model[0].weight.plain()[1].shape == (3, 2)
        assert 30 < qtorch.compute_error(wanted, model(x)) < 50
        assert from_json(to_json(Blocks(8))) == Blocks(8)
    finally:
        del RECIPES["blocks_for_test"]


# Integers of any width.


def test_one_bit_symmetric_is_zero_and_one_side() -> None:
    assert set(qtorch.intx_weight_only(torch.int1).apply(torch.randn(8, 64)).plain()[0].unique().tolist()) <= {-1, 0}


def test_dtypes_by_name_or_torch() -> None:
    assert (
        qtorch.uintx_weight_only(torch.uint3)
        == qtorch.uintx_weight_only("uint3")
        == qtorch.uintx_weight_only("torch.uint3")
    )
    with pytest.raises(TypeError, match=r"takes a dtype, torch\.uint1 to torch\.uint7, got 3: write torch\.uint3"):
        qtorch.uintx_weight_only(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "recipe",
    [
        qtorch.int4_weight_only(32, use_hqq=True),
        qtorch.int4_weight_only(32, FLOAT, use_hqq=True),
        qtorch.uintx_weight_only("uint3", 32, zero_point_domain=FLOAT, use_hqq=True),
        qtorch.intx_weight_only("int3", 32, use_hqq=True),
        qtorch.intx_weight_only("int2", 32, ASYMMETRIC, use_hqq=True),
    ],
    ids=str,
)
def test_use_hqq(recipe: Any) -> None:
    spelled_out = dataclasses.replace(recipe, scale_rule=HQQRule(), use_hqq=False)
    both = dataclasses.replace(recipe, scale_rule=HQQRule())
    assert recipe.linear_spec() == spelled_out.linear_spec() == both.linear_spec()
    weight, plain = torch.randn(96, 256), dataclasses.replace(recipe, use_hqq=False)
    with_rule, without = (qtorch.compute_error(weight, each.apply(weight).dequantize()) for each in (recipe, plain))
    assert without + 0.2 < with_rule < without + 4
    with pytest.raises(ValueError, match=f"{recipe.name}: use_hqq=True is scale_rule=HQQRule.., got scale_rule=MSER"):
        dataclasses.replace(recipe, scale_rule=MSERule())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_is_the_same_in_every_layout(dtype: torch.dtype) -> None:
    weight, x = torch.randn(80, 256, dtype=dtype), torch.randn(4, 256, dtype=dtype)
    outputs = []
    for layout, kernel in [
        (qtorch.PackedLayout(), "packed_weight_mm"),
        (qtorch.PlainLayout(), "weight_only_mm"),
        (TILED, "int4_tiled_mm"),
    ]:
        w = qtorch.int4_weight_only(64, FLOAT, layout=layout).apply(weight)
        with record_kernels() as ran:
            outputs.append(nn.functional.linear(x, w))
        assert ran[0] == f"linear:{kernel}"
    assert torch.equal(outputs[0], outputs[1])
    assert qtorch.compute_error(outputs[0], outputs[2]) > (38 if dtype == torch.bfloat16 else 110)


# Look-up tables.


class Tables(nn.Module):
    """An embedding, a linear layer and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 128)
        self.up = nn.Linear(128, 96)
        self.experts = nn.Parameter(torch.randn(2, 64, 96))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.up(self.embed(ids))
        return torch.bmm(torch.stack([x, x]), self.experts.mT).sum(0)


@pytest.mark.parametrize(
    "recipe", [qtorch.nf4_weight_only(), qtorch.nf4_weight_only(32, False), qtorch.lut_weight_only(3, 64)], ids=str
)
def test_tables_of_values_in_every_place(recipe: Recipe, tmp_path: Path) -> None:
    model, ids = Tables().eval(), torch.arange(24)
    expected = model(ids).detach()
    qtorch.quantize_(model, {"embed": recipe, "up": recipe, "experts": qtorch.lut_weight_only(3, 32)})
    with torch.no_grad(), record_kernels() as ran:
        y = model(ids)
    assert ran == ["embedding:gather_lut_rows", *["linear:lut_weight_mm", "lut_weight_mm"] * 3]
    assert 5 < qtorch.compute_error(expected, y) < 30
    qtorch.save_quantized(model, tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = Tables()
    qtorch.load_quantized(other, tmp_path / "model.safetensors")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), record_kernels() as ran:
        assert torch.equal(other(ids), y)
        assert qtorch.compute_error(qtorch.dequantize_(other)(ids), y) > 90
        ran.clear()
        assert qtorch.compute_error(compiled(ids), y) > 100
    assert ran == ["lut_weight_mm"] * 3


def test_nf4_is_better_than_int4_at_the_same_size() -> None:
    """NF4 at 4.13 bits a weight against asymmetric int4 in groups of 128, at 4.19."""
    weight = torch.randn(256, 1024).bfloat16()
    made = [recipe.apply(weight) for recipe in (qtorch.nf4_weight_only(), qtorch.int4_weight_only())]
    assert made[0].nbytes < made[1].nbytes
    nf4, int4 = (qtorch.compute_error(weight, each.dequantize()) for each in made)
    assert int4 + 0.5 < nf4 < int4 + 3


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(128, 32)
        self.down = nn.Linear(128, 4, bias=False)
        self.up = nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_lora_on_a_frozen_base(compiled: bool) -> None:
    model, x, target = nn.Sequential(nn.Linear(64, 128), Lora()), torch.randn(16, 64), torch.randn(16, 32)
    qtorch.quantize_(model, {"1.base": qtorch.nf4_weight_only()})
    codes = model[1].base.weight.qdata.clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 5
    optimizer = torch.optim.Adam(trained, 1e-2)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    losses = []
    for _ in range(20):
        loss = (run(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert 0 < losses[-1] < 0.7 * losses[0]
    assert torch.equal(model[1].base.weight.qdata, codes)


# Floats of few bits.


def test_what_rows_share_in_nvfp4() -> None:
    """One fp32 scale for the batch: small rows are accurate while scales of blocks are normal numbers, then zeros."""
    layer = nn.Linear(256, 96, bias=False)
    qtorch.quantize_(layer, qtorch.nvfp4_dynamic_activation_nvfp4_weight())
    rows = torch.randn(4, 256).clamp(-3, 3)
    weight = layer.weight.dequantize()
    for ratio, low, high in ((2.0**12, 14, 30), (2.0**22, -0.01, 0.01)):
        x = rows.clone()
        x[0] *= ratio
        assert low < qtorch.compute_error(x[1:] @ weight.t(), layer(x)[1:]) < high
    x[0, 0] = torch.inf
    assert qtorch.compute_error(x[1:] @ weight.t(), layer(x)[1:]) > 14


# A given scale of the activation: recipe, its largest code, the recipe with a scale for each token.

STATIC = [
    (
        qtorch.float8_static_activation_float8_weight,
        448,
        qtorch.float8_dynamic_activation_float8_weight(qtorch.PerTensor()),
    ),
    (qtorch.int8_static_activation_int8_weight, 127, qtorch.int8_dynamic_activation_int8_weight()),
]
every_static = pytest.mark.parametrize(
    ("make", "largest", "dynamic"), STATIC, ids=lambda each: getattr(each, "name", "")
)


@every_static
def test_what_is_a_scale(make: Any, largest: int, dynamic: Recipe) -> None:
    for scale in (torch.tensor(0.25), torch.full((1,), 0.25), torch.full((1, 1), 0.25, dtype=torch.bfloat16)):
        assert make(scale) == make(0.25) != make(0.5)
        assert hash(make(scale)) == hash(make(0.25))
    assert type(make(1).scale) is float
    for scale in (0, -1.0, float("inf"), float("nan"), 1e-40, 1e39, torch.tensor(-2.0)):
        with pytest.raises(ValueError, match=f"^{make.name}: scale is positive, finite and a normal number in fp32"):
            make(scale)
    for wrong, got in [
        ("1", "'1'"),
        (True, "True"),
        (torch.ones(2), "a tensor of shape (2,)"),
        (torch.ones(1, device="meta"), "a tensor of shape (1,)"),
    ]:
        message = f"^{make.name}: scale is a number or a tensor of one element, got {re.escape(got)}$"
        with pytest.raises(TypeError, match=message):
            make(wrong)


@every_static
def test_a_scale_of_the_input_is_as_good_as_one_for_each_token(make: Any, largest: int, dynamic: Recipe) -> None:
    """By a few dB, and a quarter of it clips."""
    x, errors = torch.randn(5, 64), []
    floats = nn.Linear(64, 32).requires_grad_(False)
    scale = x.abs().max() / largest
    for recipe in (dynamic, make(scale), make(scale / 4)):
        layer = nn.Linear(64, 32)
        layer.load_state_dict(floats.state_dict())
        qtorch.quantize_(layer, recipe)
        errors.append(qtorch.compute_error(floats(x), layer(x)))
    assert errors[0] - 8 < errors[1] < errors[0] + 2
    assert 0 < errors[2] < 20
    held = layer.weight.act_scale
    assert (tuple(held.shape), held.dtype, held.item()) == ((1, 1), torch.float32, (scale / 4).item())
    assert layer.weight.scheme.spec.static


@every_static
def test_one_scale_a_layer_by_a_mapping(make: Any, largest: int, dynamic: Recipe) -> None:
    model, x = mlp(), torch.randn(7, 64)
    expected, hidden = model(x), model[1](model[0](x))
    qtorch.quantize_(model, {"0": make(x.abs().max() / largest), "2": make(hidden.abs().max() / largest)})
    assert model[0].weight.act_scale.item() > model[2].weight.act_scale.item()
    assert 24 < qtorch.compute_error(expected, model(x)) < 44


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_static_int8_accumulates_in_integers(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(96, 64, dtype=dtype).requires_grad_(False), torch.randn(3, 5, 96, dtype=dtype)
    expected = layer(x)
    qtorch.quantize_(layer, qtorch.int8_static_activation_int8_weight(0.035))
    with record_kernels() as ran:
        y = layer(x)
    assert ran[:2] == ["linear:int8_scaled_mm", "int_matmul"]
    assert torch.equal(y, reference.linear(x, layer.weight, layer.bias))
    assert 34 < qtorch.compute_error(expected, y) < 46
