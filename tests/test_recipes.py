"""What is special of one recipe or family; `test_every_recipe.py` has what holds for all."""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import qtorch
from qtorch.primitives import HQQRule, MSERule, to_json
from tests.refusals import refuses

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")

FLOAT, SYMMETRIC, ASYMMETRIC = qtorch.ZeroPointDomain.FLOAT, qtorch.MappingType.SYMMETRIC, qtorch.MappingType.ASYMMETRIC
TILED = qtorch.TensorCoreTiledLayout()


def test_text_and_calls() -> None:
    assert_expected_inline(
        json.dumps(to_json(qtorch.int4_weight_only())),
        """{"type": "Int4WeightOnly", "group_size": 128, "zero_point_domain": "ZeroPointDomain.INT", "scale_rule": {"type": "MinMaxRule"}, "layout": {"type": "PackedLayout", "axis": -1}, "use_hqq": false, "double_quantize": false}""",  # noqa: E501
    )
    with pytest.raises(AttributeError, match=r"'qtorch\.quantize_api' has no attribute 'int3_weight_only'"):
        _ = qtorch.quantize_api.int3_weight_only
    assert (
        qtorch.uintx_weight_only(torch.uint3)
        == qtorch.uintx_weight_only("uint3")
        == qtorch.uintx_weight_only("torch.uint3")
    )
    with pytest.raises(TypeError, match=r"takes a dtype, torch\.uint1 to torch\.uint7, got 3: write torch\.uint3"):
        qtorch.uintx_weight_only(3)  # type: ignore[arg-type]
    assert set(qtorch.intx_weight_only(torch.int1).apply(torch.randn(8, 64)).plain()[0].unique().tolist()) == {-1, 0}
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
int8_weight_only(scale_rule=MSERule(steps=5))
int4_weight_only(group_size=-1, zero_point_domain=FLOAT)
int8_dynamic_activation_int4_weight(group_size=64, mapping_type=ASYMMETRIC, act_mapping_type=SYMMETRIC)
uintx_weight_only(dtype=uint3, group_size=32)
int8_static_activation_int8_weight(scale=0.25)""",
    )


def static_float8(**options: Any) -> qtorch.recipes.base.Recipe:
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
    (lambda: qtorch.quantize_(torch.nn.Linear(40, 8), qtorch.mxfp4_weight_only()), "does not divide"),
    (
        lambda: qtorch.quantize_(torch.nn.Linear(48, 8), qtorch.int4_weight_only(-1, FLOAT, layout=TILED)),
        r"takes groups of 32, 64, 128 or 256 along a row, the weight has blocks of \(1, 48\)",
    ),
    (lambda: qtorch.recipes.base.register_recipe("int8_weight_only")(_Mine), "'int8_weight_only' is taken"),
]


@dataclasses.dataclass(frozen=True)
class _Mine(qtorch.recipes.base.WeightRecipe):
    pass


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_a_wrong_argument_fails_in_the_call(call: Callable[[], object], message: str) -> None:
    refuses(message, call)


@pytest.mark.parametrize(("recipe", "shape"), [
    (qtorch.int8_weight_only(), (64, 1)),
    (qtorch.int8_dynamic_activation_int8_weight(), (64, 1)),
    (qtorch.int8_weight_only(group_size=16), (64, 16)),
    (qtorch.int4_weight_only(), (64, 2)),
    (qtorch.int4_weight_only(group_size=-1), (64, 1)),
    (qtorch.int8_dynamic_activation_int4_weight(), (64, 8)),
    (qtorch.int8_dynamic_activation_int4_weight(256, ASYMMETRIC), (64, 1)),
    (qtorch.uintx_weight_only("uint3"), (64, 4)),
], ids=str)  # fmt: skip
def test_scales_and_codes(recipe: qtorch.recipes.base.WeightRecipe, shape: tuple[int, int]) -> None:
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


# Integers of any width.


@pytest.mark.parametrize("recipe", [
    qtorch.int4_weight_only(32, use_hqq=True),
    qtorch.int4_weight_only(32, FLOAT, use_hqq=True),
    qtorch.uintx_weight_only("uint3", 32, zero_point_domain=FLOAT, use_hqq=True),
    qtorch.intx_weight_only("int3", 32, use_hqq=True),
    qtorch.intx_weight_only("int2", 32, ASYMMETRIC, use_hqq=True),
], ids=str)  # fmt: skip
def test_use_hqq(recipe: Any) -> None:
    spelled_out = dataclasses.replace(recipe, scale_rule=HQQRule(), use_hqq=False)
    both = dataclasses.replace(recipe, scale_rule=HQQRule())
    assert recipe.linear_spec() == spelled_out.linear_spec() == both.linear_spec()
    weight, plain = torch.randn(96, 256), dataclasses.replace(recipe, use_hqq=False)
    with_rule, without = (qtorch.compute_error(weight, each.apply(weight).dequantize()) for each in (recipe, plain))
    assert without + 0.2 < with_rule < without + 4
    with pytest.raises(ValueError, match=f"{recipe.name}: use_hqq=True is scale_rule=HQQRule.., got MSER"):
        dataclasses.replace(recipe, scale_rule=MSERule())


# Floats of few bits.


def test_what_rows_share_in_nvfp4() -> None:
    """One fp32 scale for the batch: small rows are accurate while scales of blocks are normal numbers, then zeros."""
    layer = torch.nn.Linear(256, 96, bias=False)
    qtorch.quantize_(layer, qtorch.nvfp4_dynamic_activation_nvfp4_weight())
    rows = torch.randn(4, 256).clamp(-3, 3)
    weight = layer.weight.dequantize()
    for ratio, low, high in ((2.0**12, 14, 30), (2.0**22, -0.01, 0.01)):
        x = rows.clone()
        x[0] *= ratio
        assert low < qtorch.compute_error(x[1:] @ weight.t(), layer(x)[1:]) < high
    x[0, 0] = torch.inf
    assert qtorch.compute_error(x[1:] @ weight.t(), layer(x)[1:]) > 14


STATIC = [qtorch.float8_static_activation_float8_weight, qtorch.int8_static_activation_int8_weight]


@pytest.mark.parametrize("make", STATIC, ids=lambda make: make.name)
def test_what_is_a_scale(make: Any) -> None:
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
        message = f"^{make.name}: scale takes a number or (None|a tensor of one element), got {re.escape(got)}$"
        refuses(message, lambda wrong=wrong: make(wrong), TypeError)
