"""The compiled quantizer of weights gives the bits of the torch operators: every build that this machine runs."""

import pytest
import torch

from qtorch import AffineQuantizedTensor, MappingType, PerBlock, PerGroup, PerRow, QuantSpec, ZeroPointDomain
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.kernels.custom_ops import portable
from qtorch.kernels.ops.quantize import quantize_weight
from qtorch.primitives import AbsMaxRule, Rounding
from tests.kernels.cpu.builds import NEEDS_LIBRARY

ASYMMETRIC, NO_CLIPPING = MappingType.ASYMMETRIC, MappingType.SYMMETRIC_NO_CLIPPING_ERR
# Those whose scales the compiled code chooses, too, for a weight in fp32; for groups in 16 bits, torch does.
CHOSEN = {
    "rows": QuantSpec("int8", PerRow(), quant_min=-127),
    "rows, asymmetric": QuantSpec("int8", PerRow(), ASYMMETRIC),
    "groups": QuantSpec("int8", PerGroup(24)),
    "int4 groups": QuantSpec("int4", PerGroup(24)),
    "uint4": QuantSpec("uint4", PerGroup(24), ASYMMETRIC),
    "uint7, rows": QuantSpec("uint7", PerRow(), ASYMMETRIC),
    "no zero point": QuantSpec("int3", PerGroup(8), zero_point_domain=ZeroPointDomain.NONE),
    "smallest scale": QuantSpec("int4", PerGroup(24), eps=0.02),
}
GIVEN = {
    "scales of 16 bits": QuantSpec("int4", PerGroup(24), scale_dtype=torch.bfloat16),
    "no clipping": QuantSpec("int4", PerGroup(24), NO_CLIPPING),
    "another rule": QuantSpec("uint4", PerRow(), ASYMMETRIC, scale_rule=AbsMaxRule(0.7)),
    "symmetric, unsigned": QuantSpec("uint4", PerGroup(24)),
}
NOT_COMPILED = {
    "uint8": QuantSpec("uint8", PerRow(), ASYMMETRIC),
    "tiles": QuantSpec("int8", PerBlock((4, 4))),
    "float8": QuantSpec("float8_e4m3fn", PerRow()),
    "real zero points": QuantSpec("uint4", PerGroup(24), ASYMMETRIC, ZeroPointDomain.FLOAT),
    "16 bits": QuantSpec("int16", PerRow()),
}


def weights(dtype):
    """Odd shapes, more axes, and rows that are all zero, tiny, huge, one-sided, or full of ties."""
    many = torch.randn(37, 72)
    many[0], many[1], many[2], many[3] = 0, many[1] * 1e-36, many[2] * 1e36, many[3].abs()
    many[4], many[5] = torch.arange(72) % 16 / 2 - 4, -many[5].abs()
    return [each.to(dtype) for each in (many, torch.randn(1, 24), torch.randn(3, 5, 48), torch.zeros(2, 24))]


def check(weight, spec, wanted_note):
    with record_kernels() as ran:
        found = quantize_weight(weight, spec)
    assert ran == [wanted_note]
    for got, want in zip(found, portable(quantize_weight)(weight, spec), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert got.dtype == want.dtype
            assert torch.equal(got, want), (weight.shape, spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*CHOSEN, *GIVEN])
def test_bits(build, name, dtype):
    spec = {**CHOSEN, **GIVEN}[name]
    chosen = name in CHOSEN and spec.stored_scale_dtype(dtype) is torch.float32
    for weight in weights(dtype):
        check(weight.nan_to_num(), spec, f"quantize_weight.{build}{'' if chosen else '.codes'}")


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_other_specs_run_on_torch(name):
    check(torch.randn(8, 24), NOT_COMPILED[name], "quantize_weight.torch")


@NEEDS_LIBRARY
def test_other_tensors_run_on_torch():
    spec = CHOSEN["groups"]
    check(torch.randn(24, 24).t(), spec, "quantize_weight.torch")
    check(torch.randn(0, 24), spec, "quantize_weight.torch")
    check(torch.randn(4, 24, dtype=torch.float64), spec, "quantize_weight.torch")
    stochastic = QuantSpec("int8", PerRow(), rounding=Rounding.STOCHASTIC, eps=1e9)
    check(torch.randn(4, 24), stochastic, "quantize_weight.torch")


@NEEDS_LIBRARY
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_holds_no_number_has_a_scale_of_nan(bad):
    weight = torch.randn(6, 48)
    weight[2, 30] = bad
    for name in ("groups", "rows", "uint4"):
        codes, scale, _ = quantize_weight(weight, CHOSEN[name])
        wanted = portable(quantize_weight)(weight, CHOSEN[name])
        assert scale.isnan().sum() == 1
        assert torch.equal(scale.isnan(), wanted[1].isnan())
        others = [0, 1, 3, 4, 5]
        assert torch.equal(codes[others], wanted[0][others])
        assert torch.equal(scale[others], wanted[1][others])


@NEEDS_LIBRARY
def test_from_float_uses_it():
    with record_kernels() as ran:
        AffineQuantizedTensor.from_float(torch.randn(8, 24), CHOSEN["groups"])
    library = compiled_library.library()
    assert library is not None
    assert ran == [f"quantize_weight.{library.instruction_set}"]
