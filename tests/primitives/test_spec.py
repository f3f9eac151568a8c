"""Specs as values, as text and as JSON; JSON of any class, and damaged JSON."""

import contextlib
import copy
import enum
import json
import pickle
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtorch import LinearSpec, MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken, ZeroPointDomain
from qtorch.primitives import MSERule, PercentileRule, QuantSpec, Rounding, compute_error, from_json, qdtype, to_json
from qtorch.primitives import choose_qparams_affine as choose
from qtorch.primitives import scale_rules as rules
from qtorch.primitives.affine import dequantize_affine, quantize_affine
from qtorch.primitives.files import parse_json
from qtorch.primitives.jsonable import MAX_DEPTH, jsonable
from qtorch.primitives.spec import Scheme
from tests.attack.damage import mutate, text_of
from tests.fast_part import matrix_but
from tests.refusals import refuses

GRANULARITIES = (
    st.sampled_from([PerTensor(), PerRow(), PerToken()])
    | st.builds(PerAxis, st.integers(-3, 3))
    | st.builds(PerGroup, st.just(-1) | st.integers(1, 256))
    | st.builds(PerBlock, st.lists(st.just(-1) | st.integers(1, 64), max_size=4).map(tuple))
)
RULES = (
    st.sampled_from([rules.MinMaxRule(), rules.AbsMaxRule(), rules.AbsMeanRule()])
    | st.builds(rules.PercentileRule, st.floats(1, 100))
    | st.builds(rules.MSERule, st.integers(2, 100), st.floats(0.1, 0.9))
    | st.builds(
        rules.HQQRule, st.floats(0.1, 2), st.floats(1, 9), st.floats(1, 2), st.integers(0, 40), st.integers(1, 9)
    )
    | st.builds(rules.FixedRangeRule, st.floats(-9, -1e-9), st.floats(1e-9, 9))
)
SPECS = st.builds(
    QuantSpec, dtype=st.sampled_from(["int2", "int4", "uint4", "int8", "uint8", "float8_e4m3fn"]),
    granularity=GRANULARITIES, mapping=st.sampled_from(MappingType),
    zero_point_domain=st.sampled_from([ZeroPointDomain.INT, ZeroPointDomain.FLOAT]), scale_rule=RULES,
    scale_dtype=st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
    rounding=st.sampled_from(Rounding), eps=st.none() | st.floats(1e-12, 1e-3), quant_max=st.none() | st.just(1),
)  # fmt: skip
LINEAR_SPECS = st.builds(LinearSpec, SPECS) | st.builds(LinearSpec, SPECS, SPECS, st.booleans())
SCHEMES = st.builds(Scheme, LINEAR_SPECS, st.just((64, 128)), st.sampled_from([torch.float32, torch.bfloat16]))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SPECS | LINEAR_SPECS | SCHEMES)
def test_copies_of_a_spec_are_equal(spec: QuantSpec | LinearSpec | Scheme) -> None:
    through_text = from_json(json.loads(json.dumps(to_json(spec))))
    for copied in (through_text, pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), copy.copy(spec)):
        assert copied == spec
        assert hash(copied) == hash(spec)
        assert str(copied) == str(spec)
    # A guard of a graph compares a scheme with its deep copy on each call.
    assert (copy.deepcopy(spec) is spec) == isinstance(spec, Scheme)


def test_keys_and_json() -> None:
    spec = LinearSpec(QuantSpec("int4", PerGroup(32)), QuantSpec("int8", PerToken()))
    scheme, again = (Scheme(spec, shape((64, 128)), torch.bfloat16) for shape in (tuple, torch.Size))
    assert again == scheme
    assert hash(again) == hash(scheme)
    assert type(again.shape) is tuple
    others = {
        Scheme(LinearSpec(spec.weight), (64, 128), torch.bfloat16),
        Scheme(spec, (128, 64), torch.bfloat16),
        Scheme(spec, (64, 128), torch.float16),
    }
    assert len(others | {scheme}) == 4
    assert (scheme.weight, scheme.activation, scheme.layout) == (spec.weight, spec.activation, None)
    assert to_json(QuantSpec("int4", PerGroup(32))) == {
        "type": "QuantSpec",
        "dtype": "QDType.int4",
        "granularity": {"type": "PerGroup", "group_size": 32},
        "mapping": "MappingType.SYMMETRIC",
        "zero_point_domain": "ZeroPointDomain.INT",
        "scale_rule": {"type": "MinMaxRule"},
        **dict.fromkeys(["scale_dtype", "eps", "quant_min", "quant_max", "scale_spec", "noise"]),
        "rounding": "Rounding.NEAREST_EVEN",
        "preserve_zero": True,
        "preserve_max_val": True,
    }

    def nested(depth: int) -> object:
        tree: object = []
        for _ in range(depth):
            tree = [tree]
        return tree

    from_json(nested(MAX_DEPTH))
    refuses(f"from_json: the data is nested more than {MAX_DEPTH} deep", lambda: from_json(nested(MAX_DEPTH + 1)))
    refuses("nested too deep", lambda: parse_json("[" * 100_000 + "]" * 100_000))
    assert parse_json('{"a": [1, {"b": 2}]}') == {"a": [1, {"b": 2}]}
    refuses("the key 'b' occurs twice", lambda: parse_json('{"a": [1, {"b": 2, "c": 1, "b": 2}]}'))


@pytest.mark.parametrize("spec, wanted", [
    (QuantSpec("int8"), False),
    (QuantSpec("int8", quant_min=-127), False),
    (QuantSpec("uint8"), True),
    (QuantSpec("float8_e4m3fn"), False),
    (QuantSpec("int8", mapping=MappingType.ASYMMETRIC), True),
    (QuantSpec("uint4", zero_point_domain=ZeroPointDomain.NONE), False),
    (QuantSpec("uint4", zero_point_domain=ZeroPointDomain.FLOAT), True),
])  # fmt: skip
def test_a_zero_point_that_is_always_zero_is_left_out(spec: QuantSpec, wanted: bool) -> None:
    assert spec.has_zero_point is wanted
    assert (spec.choose_qparams(torch.ones(2, 4))[1] is not None) is wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerGroup(4), PerBlock((1, 4))])
def test_dtype_of_the_scale(granularity: object, dtype: torch.dtype) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    spec = QuantSpec("uint4", granularity, MappingType.ASYMMETRIC)  # type: ignore[arg-type]
    scale, zero_point = spec.choose_qparams(x)
    assert scale.dtype == (dtype if isinstance(granularity, PerGroup) else torch.float32)
    assert zero_point is not None
    assert zero_point.dtype == torch.uint8


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_scale_dtype_that_is_given_holds(scale_dtype: torch.dtype) -> None:
    for domain in (ZeroPointDomain.INT, ZeroPointDomain.FLOAT):
        spec = QuantSpec("uint8", PerRow(), MappingType.ASYMMETRIC, domain, scale_dtype=scale_dtype)
        scale, zero_point = spec.choose_qparams(torch.randn(4, 8))
        assert scale.dtype == scale_dtype
        assert zero_point is not None
        float_domain = domain is ZeroPointDomain.FLOAT
        assert zero_point.dtype == (scale_dtype if float_domain else torch.uint8)


@pytest.mark.parametrize("mapping", MappingType)
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerGroup(16), PerBlock((4, 16))])
def test_the_stages_are_those_of_the_functions(granularity, mapping: MappingType) -> None:
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(0))
    spec = QuantSpec("uint8", granularity, mapping, quant_max=200)
    block = granularity.block(x.shape)
    scale, zero_point = spec.choose_qparams(x)
    wanted = choose(x, mapping, block, torch.uint8, 0, 200)
    assert torch.equal(scale, wanted[0])
    assert torch.equal(zero_point.int(), wanted[1])

    codes = spec.quantize(x, scale, zero_point)
    assert torch.equal(codes, quantize_affine(x, block, *wanted, torch.uint8, 0, 200))
    real = spec.dequantize(codes, scale, zero_point, torch.bfloat16)
    wanted_real = dequantize_affine(codes, block, *wanted, torch.uint8, 0, 200, output_dtype=torch.bfloat16)
    assert torch.equal(real, wanted_real)
    assert torch.equal(spec.fake_quantize(x), spec.dequantize(codes, scale, zero_point))
    assert 20 < compute_error(x, real) < 50


CONSTANTS = [*MappingType, *ZeroPointDomain, *Rounding, torch.float32, torch.int4, torch.float8_e4m3fn, qdtype("int4")]
PLAIN = [None, True, 3, 0.1, 1e-45, "per row", "a.b", (), (1, (2,)), {"k": (1,)}]


@pytest.mark.parametrize("value", [*CONSTANTS, *PLAIN], ids=str)
def test_round_trip_through_text(value: object) -> None:
    """Of specs, granularities and rules too, in `test_spec`."""
    back = from_json(json.loads(json.dumps(to_json(value))))
    assert back == value
    assert type(back) is type(value)


def test_fields_text_and_gradients() -> None:
    assert to_json(MSERule()) == {"type": "MSERule", "steps": 41, "smallest": 0.5}
    assert to_json(PerRow()) == {"type": "PerRow"}
    assert to_json(torch.bfloat16) == "torch.bfloat16"
    assert to_json(MappingType.SYMMETRIC) == "MappingType.SYMMETRIC"
    assert to_json(qdtype("uint4")) == "QDType.uint4"
    assert from_json(to_json([1, [2]])) == (1, (2,))
    unmapped = {"mapping": MappingType.ASYMMETRIC, "zero_point_domain": ZeroPointDomain.NONE}
    refuses(r"quant_min=-9, quant_max=7 is not a range within int4's", lambda: QuantSpec("int4", quant_min=-9))
    refuses("zero point", lambda: QuantSpec("int8", **unmapped))
    refuses("needs the FLOAT or OFFSET domain, got INT", lambda: QuantSpec("int8", preserve_zero=False))
    refuses("a static activation scale needs", lambda: LinearSpec(QuantSpec("int8"), static=True))
    weight = QuantSpec("uint4", PerGroup(32), MappingType.ASYMMETRIC, ZeroPointDomain.FLOAT)
    assert str(LinearSpec(weight, QuantSpec("int8", PerToken()))) == (
        "weight uint4 PerGroup(group_size=32) asymmetric zero point float, dynamic activation int8 PerToken() symmetric"
    )
    for dtype in ("int4", "torch.int4", torch.int4, qdtype("int4")):
        assert QuantSpec(dtype) == QuantSpec("int4")  # type: ignore[arg-type]
        assert QuantSpec(dtype).dtype is qdtype("int4")  # type: ignore[arg-type]
    for block in ((1, 32), [1, 32]):
        spec = QuantSpec("int8", block)  # type: ignore[arg-type]
        assert spec.granularity == PerBlock((1, 32))
        assert (spec.block_size((4, 64)), spec.scale_shape((4, 64))) == ((1, 32), (4, 2))
    spec = QuantSpec("int4", PerGroup(8), MappingType.SYMMETRIC_NO_CLIPPING_ERR, eps=1e-6)
    other = spec.with_granularity(PerBlock((8, 1)))
    assert other.granularity == PerBlock((8, 1))
    assert other.with_granularity(PerGroup(8)) == spec
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    spec = QuantSpec("int4", PerGroup(8), rounding=Rounding.STOCHASTIC)
    first, second = (spec.fake_quantize(x, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, spec.fake_quantize(x, torch.Generator().manual_seed(2)))
    scale, zero_point = spec.choose_qparams(x)
    codes = spec.quantize(x, scale, zero_point, torch.Generator().manual_seed(1))
    assert torch.equal(first, spec.dequantize(codes, scale, zero_point))
    first.sum().backward()
    assert x.grad is not None
    assert 0 < x.grad.sum() <= x.numel()


def test_classes_of_ones_own() -> None:
    @jsonable
    @dataclass(frozen=True)
    class OnlyInThisTest:
        block: tuple[int, ...]
        dtype: torch.dtype

    value = OnlyInThisTest((1, 2), torch.float16)
    assert from_json(json.loads(json.dumps(to_json(value)))) == value
    assert jsonable(OnlyInThisTest) is OnlyInThisTest

    class PerRow(enum.Enum):
        A = 1

    refuses("the name 'PerRow' is already taken", lambda: jsonable(PerRow))
    refuses("PerRow has no JSON form", lambda: to_json(PerRow.A), TypeError)
    with pytest.raises(ValueError, match="group_size is 0; it must be positive, or -1 for a whole row"):
        from_json({"type": "PerGroup", "group_size": 0})
    refuses("int99 is not a quantized type", lambda: from_json(to_json(QuantSpec("int8")) | {"dtype": "QDType.int99"}))


@pytest.mark.parametrize("value", [torch.ones(1), lambda x: x, {1}, object()])
def test_no_json_form(value: object) -> None:
    refuses("has no JSON form; decorate the class with @jsonable", lambda: to_json(value), TypeError)


# --- data from anywhere ---
KEYS = st.one_of(st.just("type"), st.sampled_from(["dtype", "spec", "shape", "group_size", "table", "a"]))
WORDS = st.sampled_from(["PerGroup", "QuantSpec", "Scheme", "Rounding", "QDType.int8", "torch.int8", "torch.nn", "x."])
JSON_DATA = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
)


@settings(max_examples=100, deadline=None)
@given(JSON_DATA)
def test_any_data_is_read_or_refused(data: object) -> None:
    with contextlib.suppress(ValueError):
        json.dumps(to_json(from_json(data)))


@pytest.mark.parametrize("seed", matrix_but((0, 1), range(20)))
def test_damaged_data_is_read_or_refused(seed: int) -> None:
    """What is read has a hash, a name and a JSON form."""
    scale_spec = QuantSpec("int8", PerGroup(4), quant_min=-127)
    spec = QuantSpec("int4", PerGroup(32), scale_rule=PercentileRule(99.0), scale_spec=scale_spec)
    whole = to_json(Scheme(LinearSpec(spec, QuantSpec("int8")), (4, 64), torch.float32))
    rng, read = random.Random(seed), 0
    for _ in range(100):
        damaged, _ = mutate(whole, rng)
        try:
            made = from_json(parse_json(text_of(damaged)))
        except ValueError:
            continue
        read += 1
        assert repr(made)
        if isinstance(made, Scheme):
            assert hash(made) == hash(from_json(to_json(made)))
    assert 0 < read < 100


@pytest.mark.parametrize(("data", "message"), [
    ({"type": "PerGroup", "group_size": "32"}, "PerGroup.group_size takes an integer, got '32'"),
    ({"type": "PerGroup", "group_size": 32.0}, "PerGroup.group_size takes an integer, got 32.0"),
    ({"type": "PerGroup", "group_size": True}, "PerGroup.group_size takes an integer, got True"),
    ({"type": "PerBlock", "sizes": [1, 2.5]}, r"PerBlock.sizes takes tuple\[int, ...\], got \(1, 2.5\)"),
    ({"type": "PerAxis", "axis": []}, r"PerAxis.axis takes an integer, got \(\)"),
    ({"type": "PerAxis", "axis": {}}, "PerAxis.axis takes an integer, got "),
    ({"type": "FixedRangeRule", "low": float("nan"), "high": 1.0}, "a field has the value NaN"),
    ({"type": "Rounding"}, "unknown type 'Rounding'"),
    ({"type": ["PerRow"]}, r"unknown type \['PerRow'\]"),
    ({"type": None}, "unknown type None"),
    ({"type": "LinearSpec", "weight": None, "layout": {"a": [1]}}, "LinearSpec cannot be made from"),
    ({1, 2}, "takes JSON data, got a set"),
    ({"type": "PerGroup", "group_size": 4, "zeal": 1}, "PerGroup has no field zeal; the data was written by"),
    ("MappingType.DIAGONAL", "MappingType has no member 'DIAGONAL'"),
    ("torch.float33", "torch has no member 'float33'"),
    ("torch.load", "torch has no member 'load'"),
    ({"type": "PerColumn"}, "unknown type 'PerColumn'; known: .*PerRow, PerTensor"),
])  # fmt: skip
def test_what_is_refused_of_json(data: object, message: str) -> None:
    refuses(f"^from_json: {message}", lambda: from_json(data))
