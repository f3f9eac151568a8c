"""GemmSpec, TrainingSpec: what makes sense, and what is refused with the axis named."""

from __future__ import annotations

import json

import pytest
import torch

from qtorch import MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, QuantSpec
from qtorch.primitives import from_json, to_json
from qtorch.training import GemmSpec, TrainingSpec, fully_quantized, fully_quantized_float8
from qtorch.training.engine.numerics import float8, int8, integer


def test_defaults_are_full_precision() -> None:
    spec = TrainingSpec()
    assert not any(gemm.is_quantized for gemm in (spec.output, spec.grad_input, spec.grad_weight))
    assert spec.linear_spec is None
    assert str(spec) == "output full precision; grad_input full precision; grad_weight full precision"


@pytest.mark.parametrize("spec", [fully_quantized(), fully_quantized(4, None), fully_quantized_float8(PerTensor())])
def test_json_round_trip(spec: TrainingSpec) -> None:
    assert from_json(json.loads(json.dumps(to_json(spec)))) == spec
    assert hash(spec) == hash(from_json(to_json(spec)))


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_leave_out_the_lowest_code(bits: int) -> None:
    assert integer(bits).code_range == (-(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1)


def test_fully_quantized() -> None:
    spec = fully_quantized(4, 8, grad_weight=False)
    assert spec.output == GemmSpec(integer(4), integer(4))
    assert spec.grad_input == GemmSpec(int8(), int8())
    assert spec.grad_weight == GemmSpec()
    assert fully_quantized(None, 8).output == GemmSpec()
    with pytest.raises(ValueError, match="1 to 22 bits, got 23"):
        fully_quantized(23)
    gradient = fully_quantized_float8().grad_weight
    assert (gradient.lhs.dtype.name, gradient.rhs.dtype.name) == ("float8_e5m2", "float8_e4m3fn")


@pytest.mark.parametrize("granularity", [PerAxis(1), PerBlock((8, 1)), PerBlock((1, 1)), PerGroup(1)], ids=str)
@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_a_scale_along_the_contracted_axis_is_an_error(granularity: object, side: str) -> None:
    specs = {"lhs": int8(), "rhs": int8(), side: int8(granularity)}
    with pytest.raises(ValueError, match=f"{side} has a scale for each index of the contracted axis"):
        GemmSpec(**specs)
    assert GemmSpec(**specs, accumulator_dtype=torch.float32).is_quantized, "dequantized first, it makes sense"


def test_reuse_is_refused_where_scales_cannot_be_honoured() -> None:
    reuse = GemmSpec(int8(), reuse_forward=True)
    grouped = GemmSpec(int8(), int8(PerGroup(16)))
    with pytest.raises(ValueError, match="grad_input contracts n, the output features, along which the scales"):
        TrainingSpec(grouped, reuse)
    with pytest.raises(ValueError, match="grad_weight contracts m, the tokens"):
        TrainingSpec(GemmSpec(int8(PerGroup(16)), int8()), GemmSpec(), reuse)
    with pytest.raises(ValueError, match="grad_input reuses an operand that the forward leaves in full precision"):
        TrainingSpec(GemmSpec(), reuse)
    with pytest.raises(ValueError, match="output is the forward itself"):
        TrainingSpec(reuse)
    with pytest.raises(ValueError, match="leave rhs out"):
        GemmSpec(int8(), int8(), reuse_forward=True)
    asymmetric = QuantSpec("int8", PerRow(), MappingType.ASYMMETRIC)
    with pytest.raises(ValueError, match="can reuse symmetric operands only"):
        TrainingSpec(GemmSpec(int8(), asymmetric), reuse)
    assert TrainingSpec(grouped, GemmSpec(reuse_forward=True)).grad_input.lhs is None


def test_integers_that_no_kernel_multiplies() -> None:
    with pytest.raises(ValueError, match="lhs of an integer product has signed codes, got uint8"):
        GemmSpec(QuantSpec("uint8", PerRow(), MappingType.ASYMMETRIC), int8())
    with pytest.raises(ValueError, match="one divides the other, got 16 and 24"):
        GemmSpec(int8(PerGroup(16)), int8(PerGroup(24)))
    with pytest.raises(ValueError, match="where lhs has blocks, both operands are symmetric"):
        GemmSpec(int8(PerGroup(16)), QuantSpec("int8", PerGroup(16), MappingType.ASYMMETRIC))
    tiles = int8(PerBlock((32, 32)))
    with pytest.raises(ValueError, match="in blocks of 64 in lhs, which do not divide"):
        TrainingSpec(GemmSpec(tiles, tiles), GemmSpec(int8(PerBlock((64, 64))), reuse_forward=True))


def test_dtypes() -> None:
    with pytest.raises(ValueError, match=r"accumulator_dtype is a float dtype, int32, int16 or None, got torch\.int64"):
        GemmSpec(int8(), int8(), accumulator_dtype=torch.int64)


def test_what_will_serve() -> None:
    assert fully_quantized().linear_spec.weight == int8()
    tensorwise = TrainingSpec(GemmSpec(int8(), int8(PerTensor()))).linear_spec
    assert tensorwise.weight.granularity == PerRow(), "integer kernels read a scale per row"
    assert fully_quantized_float8(PerTensor()).linear_spec.weight == float8(granularity=PerTensor())
