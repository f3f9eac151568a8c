"""QuantSpec and LinearSpec: validation, equality, JSON, and the four stages."""

import copy
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtorch import LinearSpec, MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken, ZeroPointDomain
from qtorch.primitives import QuantSpec, Rounding, compute_error, from_json, qdtype, to_json
from qtorch.primitives import choose_qparams_affine as choose
from qtorch.primitives import scale_rules as rules
from qtorch.primitives.affine import dequantize_affine, quantize_affine
from qtorch.primitives.spec import Scheme
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
    QuantSpec,
    dtype=st.sampled_from(["int2", "int4", "uint4", "int8", "uint8", "float8_e4m3fn"]),
    granularity=GRANULARITIES,
    mapping=st.sampled_from(MappingType),
    zero_point_domain=st.sampled_from([ZeroPointDomain.INT, ZeroPointDomain.FLOAT]),
    scale_rule=RULES,
    scale_dtype=st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
    rounding=st.sampled_from(Rounding),
    eps=st.none() | st.floats(1e-12, 1e-3),
    quant_max=st.none() | st.just(1),
)
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


def test_a_scheme_is_a_key_of_all_its_fields() -> None:
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


def test_the_json_spells_every_field_out() -> None:
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


def test_text_form() -> None:
    weight = QuantSpec("uint4", PerGroup(32), MappingType.ASYMMETRIC, ZeroPointDomain.FLOAT)
    assert str(LinearSpec(weight, QuantSpec("int8", PerToken()))) == (
        "weight uint4 PerGroup(group_size=32) asymmetric zero point float, dynamic activation int8 PerToken() symmetric"
    )


def test_other_spellings() -> None:
    for dtype in ("int4", "torch.int4", torch.int4, qdtype("int4")):
        assert QuantSpec(dtype) == QuantSpec("int4")  # type: ignore[arg-type]
        assert QuantSpec(dtype).dtype is qdtype("int4")  # type: ignore[arg-type]
    for block in ((1, 32), [1, 32]):
        spec = QuantSpec("int8", block)  # type: ignore[arg-type]
        assert spec.granularity == PerBlock((1, 32))
        assert (spec.block_size((4, 64)), spec.scale_shape((4, 64))) == ((1, 32), (4, 2))


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


def test_fake_quantize_passes_gradients_and_reproduces() -> None:
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


def test_with_granularity_keeps_the_rest() -> None:
    spec = QuantSpec("int4", PerGroup(8), MappingType.SYMMETRIC_NO_CLIPPING_ERR, eps=1e-6)
    other = spec.with_granularity(PerBlock((8, 1)))
    assert other.granularity == PerBlock((8, 1))
    assert other.with_granularity(PerGroup(8)) == spec


def test_what_is_refused() -> None:
    unmapped = {"mapping": MappingType.ASYMMETRIC, "zero_point_domain": ZeroPointDomain.NONE}
    refuses(r"quant_min=-9, quant_max=7 is not a range within int4's", lambda: QuantSpec("int4", quant_min=-9))
    refuses("zero point", lambda: QuantSpec("int8", **unmapped))
    refuses("needs the FLOAT or OFFSET domain, got INT", lambda: QuantSpec("int8", preserve_zero=False))
    refuses("a static activation scale needs", lambda: LinearSpec(QuantSpec("int8"), static=True))
