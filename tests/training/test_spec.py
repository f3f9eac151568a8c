"""GemmSpec, TrainingSpec: what makes sense, and what is refused with the axis named."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from qtorch import MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, QuantSpec
from qtorch.primitives import AbsMeanRule, from_json, to_json
from qtorch.training import GemmSpec, TrainingSpec, fully_quantized, fully_quantized_float8
from qtorch.training.engine.numerics import float8, int8, integer
from tests.refusals import refuses


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
    refuses("1 to 22 bits, got 23", lambda: fully_quantized(23))
    gradient = fully_quantized_float8().grad_weight
    assert (gradient.lhs.dtype.name, gradient.rhs.dtype.name) == ("float8_e5m2", "float8_e4m3fn")


@pytest.mark.parametrize("granularity", [PerAxis(1), PerBlock((8, 1)), PerBlock((1, 1)), PerGroup(1)], ids=str)
@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_a_scale_along_the_contracted_axis_is_an_error(granularity: object, side: str) -> None:
    specs = {"lhs": int8(), "rhs": int8(), side: int8(granularity)}
    refuses(f"{side} has a scale for each index of the contracted axis", lambda: GemmSpec(**specs))
    assert GemmSpec(**specs, accumulator_dtype=torch.float32).is_quantized, "dequantized first, it makes sense"


def test_what_will_serve() -> None:
    assert fully_quantized().linear_spec.weight == int8()
    tensorwise = TrainingSpec(GemmSpec(int8(), int8(PerTensor()))).linear_spec
    assert tensorwise.weight.granularity == PerRow(), "integer kernels read a scale per row"
    assert fully_quantized_float8(PerTensor()).linear_spec.weight == float8(granularity=PerTensor())


ROWS, TILES, GROUPS = int8(), int8(PerBlock((32, 32))), int8(PerGroup(16))
ASYMMETRIC, UNSIGNED = (QuantSpec(dtype, PerRow(), MappingType.ASYMMETRIC) for dtype in ("int8", "uint8"))
FULL, REUSE = GemmSpec(), GemmSpec(ROWS, reuse_forward=True)
BALANCED = GemmSpec(ROWS, ROWS, mid_alpha=(0.5, 0.5))
MEAN = replace(ROWS, scale_rule=AbsMeanRule())
REFUSED: dict[str, Callable[[], object]] = {
    "leave rhs out": lambda: GemmSpec(ROWS, ROWS, reuse_forward=True),
    "reuse_forward takes an operand as it is": lambda: GemmSpec(reuse_forward=True, mid_alpha=(0.5, 0.5)),
    "fold names an operand that is quantized": lambda: GemmSpec(ROWS, None, fold="rhs"),
    "fold takes a symmetric operand with a scale for each": lambda: GemmSpec(ROWS, ROWS, fold="rhs"),
    "sums products of integers of at most 8": lambda: GemmSpec(ROWS, integer(9), accumulator_dtype=torch.int16),
    r"a float dtype, int32, int16 or None, got torch\.int64": lambda: GemmSpec(ROWS, accumulator_dtype=torch.int64),
    "lhs of an integer product has signed codes, got uint8": lambda: GemmSpec(UNSIGNED, ROWS),
    "one divides the other, got 16 and 24": lambda: GemmSpec(GROUPS, int8(PerGroup(24))),
    "where lhs has blocks, both operands are": lambda: GemmSpec(GROUPS, replace(ASYMMETRIC, granularity=PerGroup(16))),
    "output is the forward itself": lambda: TrainingSpec(REUSE),
    "grad_input contracts n, the output features, along": lambda: TrainingSpec(GemmSpec(ROWS, GROUPS), REUSE),
    "grad_weight contracts m, the tokens": lambda: TrainingSpec(GemmSpec(GROUPS, ROWS), FULL, REUSE),
    "reuses an operand that the forward leaves in full": lambda: TrainingSpec(FULL, REUSE),
    "can reuse symmetric operands only": lambda: TrainingSpec(GemmSpec(ROWS, ASYMMETRIC), REUSE),
    "in blocks of 64 in lhs, which do not divide": lambda: TrainingSpec(
        GemmSpec(TILES, TILES), GemmSpec(int8(PerBlock((64, 64))), reuse_forward=True)
    ),
    "cannot reuse an operand that the forward has changed": lambda: TrainingSpec(BALANCED, REUSE),
    "need the operands as they come": lambda: TrainingSpec(BALANCED, clip_gradient=True),
    "symmetric specs whose scale is absmax": lambda: TrainingSpec(GemmSpec(None, MEAN), scale_gradient=True),
    "grad_weight has only codes of": lambda: TrainingSpec(GemmSpec(ROWS, ROWS), FULL, REUSE, scale_gradient=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    refuses(message, lambda: REFUSED[message]())


def test_a_reused_operand_may_have_groups_where_the_other_one_is_in_full_precision() -> None:
    assert TrainingSpec(GemmSpec(ROWS, GROUPS), GemmSpec(reuse_forward=True)).grad_input.lhs is None
