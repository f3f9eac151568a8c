"""The numerics of AQT against results of aqtp 0.9.0, which `aqt_numbers.json` has: codes, scale and values of 16
numbers for every width, both ways of `preserve_zero` and `preserve_max_val`, the calibrations, and the small
floating-point formats."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qtorch import MappingType, PerAxis, PerRow, QuantSpec, ZeroPointDomain, primitives
from qtorch.primitives import AbsMaxRule, Noise, PowerMeanRule, Rounding, ScaleRule, from_json, qdtype, to_json
from qtorch.training import integer
from tests.refusals import refuses

NUMBERS: Any = json.loads((Path(__file__).parent / "aqt_numbers.json").read_text())
X = torch.tensor([NUMBERS["input"]])


def check(spec: QuantSpec, wanted: Any, scale_ratio: float = 1.0) -> None:
    scale, zero_point = spec.choose_qparams(X)
    assert zero_point is None
    torch.testing.assert_close(scale.item() * scale_ratio, wanted["scale"], rtol=1e-6, atol=0)
    codes = spec.quantize(X, scale, None)
    torch.testing.assert_close(spec.dtype.decode(codes)[0] / scale_ratio, torch.tensor(wanted["codes"]), rtol=0, atol=0)
    values = spec.dequantize(codes, scale, None)[0]
    torch.testing.assert_close(values, torch.tensor(wanted["values"]), rtol=1e-6, atol=1e-7)


def name_of(case: Any) -> str:
    zero, largest = ("T" if case[flag] else "F" for flag in ("preserve_zero", "preserve_max_val"))
    return f"{case['bits']} bits {zero},{largest}"


@pytest.mark.parametrize("case", NUMBERS["int"], ids=name_of)
def test_integers(case: Any) -> None:
    bits, zero, largest = case["bits"], case["preserve_zero"], case["preserve_max_val"]
    spec = integer(bits, PerRow(), preserve_zero=zero, preserve_max_val=largest)
    bound = 2 ** (bits - 1) - (0, 0.5, 1)[zero + largest]
    scale, _ = spec.choose_qparams(X)
    torch.testing.assert_close(scale.item(), X.abs().max().item() / bound, rtol=1e-6, atol=0)
    check(spec, case)


@pytest.mark.parametrize("case", NUMBERS["rules"], ids=lambda case: f"{case['rule']} {case['clipping_scale']}")
def test_scale_rules(case: Any) -> None:
    rule: ScaleRule = AbsMaxRule(case["clipping_scale"])
    if case["rule"] == "AbsMean":
        rule = PowerMeanRule(case["p"], case["clipping_scale"])
    check(QuantSpec("int4", quant_min=-7, scale_rule=rule), case)


@pytest.mark.parametrize("case", NUMBERS["float"], ids=lambda case: case["name"])
def test_small_floats(case: Any) -> None:
    """Formats with subnormals are those of the OCP specification times a power of two, which the scale takes up."""
    name, _, subnormals = case["name"].partition("_")
    bits = 1 + int(name[1]) + int(name[3])
    spec = QuantSpec(f"float{bits}_{name}{'' if subnormals else 'n'}", zero_point_domain=ZeroPointDomain.NONE)
    ratio = spec.dtype.quant_max / case["bound"]
    scale, _ = spec.choose_qparams(X)
    torch.testing.assert_close(scale.item() * ratio, case["scale"], rtol=1e-6, atol=0)
    values = spec.fake_quantize(X)[0]
    # AQT rounds bf16 numbers, ties away from zero: values near a boundary may go to the other neighbour.
    wanted = torch.tensor(case["values"])
    magnitudes = torch.tensor(spec.dtype.format.magnitudes) * scale.item()  # type: ignore[union-attr]
    for got, theirs, x in zip(values, wanted, X[0], strict=True):
        distances = (torch.cat([magnitudes, -magnitudes]) - x).abs()
        assert (got - x).abs() <= distances.min() * (1 + 1e-5) + 1e-7
        assert (theirs - x).abs() <= distances.min() + 0.01 * x.abs() + 1e-6 or x == 0


def test_midrise_codes_noise_and_errors() -> None:
    kind = qdtype("midrise3")
    codes = torch.arange(8, dtype=torch.uint8)
    assert kind.decode(codes).tolist() == [0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, -3.5]
    assert torch.equal(kind.encode(kind.decode(codes)), codes)
    assert kind.decode(kind.encode(torch.tensor([1.0, -1.0, 0.0, 9.0, -9.0]))).tolist() == [1.5, -0.5, 0.5, 3.5, -3.5]
    assert not kind.has_zero
    assert qdtype("float4_e2m1").has_zero
    assert not qdtype("float4_e2m1n").has_zero
    spec = integer(1, preserve_zero=False)
    x = torch.tensor([[-2.0, -0.1, 0.0, 0.1, 2.0]])
    assert spec.fake_quantize(x).tolist() == [[-2, -2, 2, 2, 2]]
    u = Noise((0,), 16).draw((6, 4), torch.device("cpu"), torch.Generator().manual_seed(3))
    assert (u == u[0]).all()
    assert len(u[0].unique()) == 4
    assert ((u * 2**17) % 2 == 1).all(), "odd multiples of 2^-17"
    spec = QuantSpec("int8", PerAxis(0), rounding=Rounding.STOCHASTIC, noise=Noise((0,), 16))
    x = torch.full((6, 4), 0.5)
    codes = spec.quantize(x, torch.ones(6, 1), None, torch.Generator().manual_seed(3))
    assert torch.equal(codes, (u < 0.5).to(torch.int8))
    refuses("noise is that of stochastic rounding", lambda: QuantSpec("int8", noise=Noise()))
    refuses("bits is 1 to 23", lambda: Noise(bits=24))
    refuses("names an axis twice", lambda: Noise((0, 0)))
    refuses("does not have", lambda: Noise((2,)).draw((3, 4), torch.device("cpu")))
    with pytest.raises(ValueError, match="preserve_max_val=False is for symmetric"):
        QuantSpec("uint4", mapping=MappingType.ASYMMETRIC, preserve_max_val=False)
    with pytest.raises(ValueError, match="preserve_max_val=False is for symmetric"):
        primitives.choose_qparams_affine_with_min_max(
            torch.zeros(1), torch.ones(1), MappingType.ASYMMETRIC, (), torch.int8, preserve_max_val=False
        )
    for rule, name in ((AbsMaxRule, "clipping_scale"), (PowerMeanRule, "p")):
        refuses(f"{rule.__name__}: {name} is positive", lambda rule=rule: rule(0.0))
    refuses("1 to 22 bits", lambda: integer(23))
    refuses("one bit has no zero", lambda: integer(1))


@pytest.mark.parametrize("name", ["midrise1", "midrise3", "float4_e2m1n", "float4_e0m3n"])
def test_stochastic_rounding_without_a_zero_is_unbiased(name: str) -> None:
    kind = qdtype(name)
    x = (torch.tensor([0.2, -0.2, 0.0, 1.3, -9.0]).clamp(kind.quant_min, kind.quant_max)).repeat(40000, 1)
    values = kind.decode(kind.encode(x, Rounding.STOCHASTIC, torch.Generator().manual_seed(0)))
    assert (values.mean(0) - x[0]).abs().max() < 0.03
    assert all(len(column.unique()) <= 2 for column in values.t())


@pytest.mark.parametrize("bits", [None, 16, 1])
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "float6_e3m2", "midrise4"])
def test_noise_with_shared_axes(name: str, bits: int | None) -> None:
    """Elements that share a random number and a value share the code; the expectation stays."""
    spec = QuantSpec(name, rounding=Rounding.STOCHASTIC, noise=Noise((1,), bits))
    assert from_json(to_json(spec)) == spec
    row = torch.linspace(-2, 1.9, 5).repeat_interleave(3)
    x = row.repeat(4000, 1)
    scale, _ = spec.choose_qparams(x)
    codes = spec.quantize(x, scale, None, torch.Generator().manual_seed(1))
    grouped = codes.unflatten(1, (5, 3)).float()
    assert (grouped == grouped[..., :1]).all()
    assert codes.float().unique(dim=0).shape[0] > 1
    values = spec.dequantize(codes, scale, None)
    step = (spec.fake_quantize(x) - x).abs().max() if bits == 1 else 0.02
    assert (values.mean(0) - row).abs().max() <= step
    independent = QuantSpec(name, rounding=Rounding.STOCHASTIC).quantize(x, scale, None)
    assert not (independent.unflatten(1, (5, 3)).float() == independent.unflatten(1, (5, 3)).float()[..., :1]).all()
