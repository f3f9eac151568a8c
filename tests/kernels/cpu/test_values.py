"""Compiled weight-only layers whose codes are no integers, against exact arithmetic: every type, build and variant."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qtorch import CodebookSpec, LinearSpec, PackedLayout, PerGroup, PerRow, PlainLayout, QuantSpec, ZeroPointDomain
from qtorch.dtypes import AffineQuantizedTensor, LUTQuantizedTensor
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import variants
from qtorch.kernels.cpu.code_values import FLOATS, CodeValues
from qtorch.primitives import NF4_TABLE, qdtype
from qtorch.primitives.layouts.packed import can_pack_bits
from tests.fast_part import slow_but
from tests.kernels.cpu.builds import NEEDS_LIBRARY
from tests.rounding import assert_same_product

TABLES = {
    "NF4": CodebookSpec("uint4", PerGroup(64), NF4_TABLE),
    "one table of 3 bits": CodebookSpec("uint3", PerGroup(32), tuple(x / 4 - 1 for x in range(8))),
    "tables of 4 bits": CodebookSpec("uint4"),
    "tables of 2 bits": CodebookSpec("uint2"),
    "tables of 5 bits": CodebookSpec("uint5"),
    "tables of 8 bits": CodebookSpec("uint8"),
}
SHAPES = [(37, 192), (6, 1024), (5, 160)]
"""(N, K): whole vectors of a packed run in the second alone; the last is no multiple of 64."""


def weights(name: str) -> list[Tensor]:
    if name in TABLES:
        spec = TABLES[name]
        size = getattr(spec.granularity, "group_size", 1)
        return [LUTQuantizedTensor.from_float(torch.randn(n, k), spec) for n, k in SHAPES if k % size == 0]
    layouts = [PlainLayout(), PackedLayout()] if can_pack_bits(qdtype(name)) else [PlainLayout()]
    specs = [
        QuantSpec(name, granularity, zero_point_domain=ZeroPointDomain.NONE) for granularity in (PerRow(), PerGroup(32))
    ]
    return [
        AffineQuantizedTensor.from_float(torch.randn(n, k), LinearSpec(spec, layout=layout))
        for spec, layout, (n, k) in itertools.product(specs, layouts, SHAPES)
    ]


@pytest.mark.parametrize("name", FLOATS)
def test_numbers_of_codes(name: str) -> None:
    """The table has the numbers of all codes, and so have the codes that are computed."""
    kind, found = qdtype(name), CodeValues.of_type(name)
    codes = torch.arange(2**kind.bits, dtype=torch.uint8).view(kind.storage)
    torch.testing.assert_close(found.table[0, : found.length], kind.decode(codes), rtol=0, atol=0, equal_nan=True)
    has_exponent = kind.bits > 4 and "fnuz" not in name and "midrise" not in name
    assert (found.exponent > 0) == has_exponent
    assert not has_exponent or found.exponent + found.mantissa + 1 == kind.bits


@pytest.mark.parametrize("variant", ["dot", "tile", "float"])
@pytest.mark.parametrize("name", slow_but((FLOATS[0], "float4_e2m1", "NF4", "tables of 5 bits"), [*FLOATS, *TABLES]))
def test_against_exact_arithmetic(build: str, name: str, variant: str) -> None:
    kernel = "cpu_lut_mm" if name in TABLES else "cpu_weight_only_mm"
    with variants.force(variant):
        for weight in weights(name):
            exact = weight.dequantize()
            for rows in (1, 8, 17):
                x, bias = torch.randn(rows, weight.shape[1]), torch.randn(weight.shape[0])
                with record_kernels() as ran:
                    y = functional.linear(x, weight, bias)
                assert ran[-1] == f"{kernel}.{build}.{variant}"
                assert_same_product(y, functional.linear(x, exact, bias), x, exact, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1", "NF4", "tables of 4 bits"])
@NEEDS_LIBRARY
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """The result is rounded once; F.linear takes a weight that is rounded to the dtype, too."""
    unit = torch.finfo(dtype).eps / 2
    for weight, rows in itertools.product(weights(name), (1, 8, 100)):
        x, weight = torch.randn(rows, weight.shape[1]).to(dtype), weight.to(dtype)
        exact, y = weight.to(torch.float32).dequantize().double(), functional.linear(x, weight)
        size = x.double().abs() @ exact.abs().t()
        error = ((y.double() - x.double() @ exact.t()).abs() / size).max()
        assert y.dtype is dtype
        assert 0 < float(error) < 4 * unit


@NEEDS_LIBRARY
def test_codes_that_are_no_numbers() -> None:
    """Infinities and NaN of a row stay in its column of the result."""
    spec = QuantSpec("float8_e5m2", zero_point_domain=ZeroPointDomain.NONE)
    weight = AffineQuantizedTensor.from_float(torch.randn(6, 64), spec)
    codes = weight.qdata.view(torch.uint8)
    codes[1, 3], codes[4, 5] = 0x7C, 0xFE
    x = torch.rand(2, 64) + 1
    for variant in ("dot", "tile", "float"):
        with variants.force(variant):
            y = functional.linear(x, weight)
        assert bool(y[:, 1].isposinf().all())
        assert bool(y[:, 4].isnan().all())
        assert bool(y[:, [0, 2, 3, 5]].isfinite().all())


def test_tables_of_groups_run_in_torch() -> None:
    weight = LUTQuantizedTensor.from_float(torch.randn(8, 128), CodebookSpec("uint3", PerGroup(64)))
    with record_kernels() as ran:
        functional.linear(torch.randn(2, 128), weight)
    assert ran[0] == "linear:lut_weight_mm"
