"""Few-bit floats, and rounding to them: every code, chance, powers of two."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from qtorch import PerGroup, PerRow, QuantSpec, ZeroPointDomain
from qtorch.primitives import MappingType, Rounding, compute_error, qdtype, round_to_integer
from qtorch.primitives.floatx import FloatFormat, floor_to_power_of_two
from qtorch.primitives.qdtype import QDTYPES


def bias_of(ebits: int) -> int:
    """Fixed point, without exponent bits, has the range of AQT."""
    return 2 ** (ebits - 1) - 1 if ebits else 1


# name: (format, largest value, smallest normal, smallest subnormal): OCP Microscaling specification v1.0, table 1
FORMATS = {
    "float6_e3m2": (FloatFormat(3, 2), 28.0, 0.25, 0.0625),
    "float6_e2m3": (FloatFormat(2, 3), 7.5, 1.0, 0.125),
    "float5_e2m2": (FloatFormat(2, 2), 7.0, 1.0, 0.25),
    "float5_e3m1": (FloatFormat(3, 1), 24.0, 0.25, 0.125),
    "float4_e2m1": (FloatFormat(2, 1), 6.0, 1.0, 0.5),
    "float3_e2m0": (FloatFormat(2, 0), 4.0, 1.0, 1.0),
}
# And those that a user has registered.
FORMATS |= {
    dtype.name: (form, form.max, 2.0 ** (1 - bias_of(form.ebits)), 2.0 ** (1 - bias_of(form.ebits) - form.mbits))
    for dtype in QDTYPES.values()
    if isinstance(form := dtype.format, FloatFormat) and form.subnormals and dtype.name not in FORMATS
}
every_format = pytest.mark.parametrize("name", FORMATS)


def value_of(code: int, ebits: int, mbits: int) -> Fraction:
    """From the bits, in exact arithmetic."""
    sign, exponent, mantissa = code >> (ebits + mbits), (code >> mbits) % 2**ebits, code % 2**mbits
    bias = bias_of(ebits)
    significand = Fraction(mantissa, 2**mbits) + (1 if exponent else 0)
    return (-1) ** sign * significand * Fraction(2) ** (max(exponent, 1) - bias)


@every_format
def test_every_code_and_every_midpoint(name):
    form, largest, _, smallest = FORMATS[name]
    codes = torch.arange(2**form.bits, dtype=torch.uint8)
    values = form.decode(codes)
    assert values.tolist() == [float(value_of(code, form.ebits, form.mbits)) for code in range(2**form.bits)]
    assert torch.equal(form.encode(values), codes), "the sign of zero included"
    assert form.name == name
    assert values.max() == largest == qdtype(name).quant_max
    assert values[values > 0].min() == smallest
    form = FORMATS[name][0]
    count = 2 ** (form.bits - 1)
    for code in range(count - 1):
        low, high = (float(value_of(c, form.ebits, form.mbits)) for c in (code, code + 1))
        middle = torch.tensor((low + high) / 2)
        even = code + code % 2
        around = torch.stack([torch.nextafter(middle, torch.tensor(0.0)), middle, torch.nextafter(middle, 2 * middle)])
        assert form.encode(around).tolist() == [code, even, code + 1]
        assert form.encode(-around).tolist() == [c + count for c in (code, even, code + 1)]
    form = FORMATS[name][0]
    x = torch.tensor([form.max * 1.001, 1e30, float("inf"), -1e30])
    assert form.decode(form.encode(x)).tolist() == [form.max, form.max, form.max, -form.max]


@every_format
def test_stochastic_rounding_is_unbiased(name):
    form = FORMATS[name][0]
    x = torch.tensor([0.3, -0.3, 1.1, 3.3, -form.max, 0.0]).clamp(max=form.max).repeat(20000, 1)
    codes = form.encode(x, Rounding.STOCHASTIC, torch.Generator().manual_seed(0))
    values = form.decode(codes)
    assert torch.equal(codes, form.encode(x, Rounding.STOCHASTIC, torch.Generator().manual_seed(0)))
    distance = max(b - a for a, b in itertools.pairwise(m for m in form.magnitudes if m <= 8))
    assert (values.mean(0) - x[0]).abs().max() < 0.025 * max(1, distance)
    assert all(len(column.unique()) <= 2 for column in values.t())


@every_format
@pytest.mark.parametrize("scale_dtype", [None, torch.float8_e8m0fnu])
def test_quantization(name, scale_dtype):
    """About 6 dB a mantissa bit, whatever the exponent bits add; where codes are equally spaced, 6 dB a bit."""
    spec = QuantSpec(name, PerGroup(32), zero_point_domain=ZeroPointDomain.NONE, scale_dtype=scale_dtype)
    x = torch.randn(64, 128)
    scale, zero_point = spec.choose_qparams(x)
    codes = spec.quantize(x, scale, zero_point)
    assert codes.dtype == torch.uint8
    assert codes.max() < 2 ** qdtype(name).bits
    assert torch.equal(spec.dequantize(codes, scale, None), spec.fake_quantize(x))
    form = FORMATS[name][0]
    at_least = 11 + 6.5 * form.mbits if form.ebits > 1 else 6 * (form.ebits + form.mbits) - 2
    assert at_least < compute_error(x, spec.fake_quantize(x)) < at_least + 8


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
def test_stochastic_rounding_of_torchs_own_types(name):
    """To one of the two neighbours, with the expectation of the value; what the type has stays as it is."""
    kind, generator = qdtype(name), torch.Generator().manual_seed(0)
    x = torch.tensor([0.3, -0.3, 1.07, -3.3, 2.0**-8, 0.0]).repeat(20000, 1)
    values = kind.encode(x, Rounding.STOCHASTIC, generator).float()
    assert (values.mean(0) - x[0]).abs().max() < 0.01
    nearest = x.to(kind.storage).float()
    assert values.unique(dim=0).shape[0] > 1
    assert ((values - x).abs() <= 2 * (nearest - x).abs() + 0.5 * x.abs()).all()
    assert all(len(column.unique()) <= 2 for column in values.t())
    exact = torch.arange(256, dtype=torch.uint8).view(kind.storage)
    again = kind.encode(exact.float().nan_to_num(posinf=kind.quant_max, neginf=kind.quant_min), Rounding.STOCHASTIC)
    assert torch.equal(again.float(), exact.float().nan_to_num(posinf=kind.quant_max, neginf=kind.quant_min))
    assert kind.encode(torch.tensor([torch.nan]), Rounding.STOCHASTIC).float().isnan().all()


@pytest.mark.parametrize("absmax", [1.0, 1.5, 1.999, 2.0, 5.0, 6.0, 7.0, 1e-20, 3e38])
@pytest.mark.parametrize("name", ["float4_e2m1", "float6_e3m2", "float8_e4m3fn"])
def test_power_of_two_scale(name, absmax):
    """The shared exponent of the OCP Microscaling specification v1.0, section 6.3."""
    spec = QuantSpec(name, PerRow(), zero_point_domain=ZeroPointDomain.NONE, scale_dtype=torch.float8_e8m0fnu)
    scale, _ = spec.choose_qparams(torch.tensor([[absmax, -absmax / 3]]))
    exponent = math.frexp(torch.tensor(absmax).item())[1] - 1 - math.floor(math.log2(qdtype(name).quant_max))
    assert scale.float().item() == 2.0**exponent


def test_powers_of_two_and_random_numbers():
    spec = QuantSpec("uint4", PerRow(), MappingType.ASYMMETRIC, scale_dtype=torch.float8_e8m0fnu)
    assert spec.choose_qparams(torch.tensor([[0.0, 15.0]]))[0].float().item() == 1
    x = torch.randn(50, 40)
    scale, zero_point = spec.choose_qparams(x)
    assert torch.equal(scale.float(), floor_to_power_of_two(scale.float()))
    assert ((x - spec.dequantize(spec.quantize(x, scale, zero_point), scale, zero_point)).abs() <= scale.float()).all()
    x = torch.tensor([1.0, 1.999, 2.0, 3.0, 0.75, 1e-30, 0.0])
    assert floor_to_power_of_two(x).tolist() == [1.0, 1.0, 2.0, 2.0, 0.5, 2.0**-100, 0.0]
    # Of the default one, if there is none; a generator leaves that alone.
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10
    torch.manual_seed(3)
    assert torch.equal(stochastic(x, 5), stochastic(x, 5))
    assert not torch.equal(stochastic(x, 5), stochastic(x, 6))
    first, second = (round_to_integer(x, Rounding.STOCHASTIC) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(round_to_integer(x, Rounding.STOCHASTIC), first)
    assert not torch.equal(first, second)


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def stochastic(x: torch.Tensor, seed: int) -> torch.Tensor:
    return round_to_integer(x, Rounding.STOCHASTIC, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nearest_and_stochastic(dtype: torch.dtype) -> None:
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49, 0.51], dtype=dtype)
    wanted = torch.tensor([-2.0, -2.0, 0.0, 0.0, 2.0, 2.0, 0.0, 1.0], dtype=dtype)
    assert torch.equal(round_to_integer(x), wanted)
    x = (torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    rounded = stochastic(x, 1)
    assert rounded.dtype == dtype
    assert ((rounded == x.floor()) | (rounded == x.ceil())).all()
    assert (rounded == x.floor()).any()
    assert (rounded == x.ceil()).any()
    x = torch.tensor([-128.0, -1, 0, 1, 127, 2048, torch.finfo(dtype).max], dtype=dtype)
    x = x.repeat(1000, 1)
    assert torch.equal(stochastic(x, 0), x)


def test_stochastic_never_moves_an_integer_though_u_be_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    x = torch.tensor([-2.0, -0.5, 0.0, 0.5, 3.0])
    rounded = round_to_integer(x, Rounding.STOCHASTIC)
    assert torch.equal(rounded, x.ceil())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.001, -0.001, 0.25, -0.75, 3.5, 100.3, -100.3])
def test_stochastic_is_unbiased(value: float, dtype: torch.dtype) -> None:
    x = torch.full((200_000,), value, dtype=dtype)
    rounded = stochastic(x, 0).double()
    fraction = (x[0].double() - x[0].double().floor()).item()
    standard_error = (fraction * (1 - fraction) / x.numel()) ** 0.5
    assert abs((rounded.mean() - x[0].double()).item()) < 4 * standard_error + 1e-12


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 0.5)
    assert stochastic(x, 0).shape == round_to_integer(x).shape == shape
