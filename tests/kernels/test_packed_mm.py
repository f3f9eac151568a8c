"""Linear on the packed layout: the bits of the plain one for every scheme, transposed weights, operators."""

import pytest
import torch
from torch.nn import functional

from qtorch import (
    AffineQuantizedTensor,
    LinearSpec,
    MappingType,
    PackedLayout,
    PerGroup,
    PerRow,
    PlainLayout,
    QuantSpec,
)
from qtorch.kernels import record_kernels
from qtorch.kernels.linear import reference
from qtorch.primitives import ZeroPointDomain, compute_error, qdtype
from qtorch.primitives.layouts.packed import RowsInSlices, pack_codes, unpack_codes
from tests.rounding import assert_same_product

# The kernels made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")

ASYMMETRIC = MappingType.ASYMMETRIC
TOKEN = QuantSpec("int8", PerRow(), quant_min=-127)
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
ACTIVATIONS = {"none": None, "symmetric": TOKEN, "asymmetric": QuantSpec("int8", PerRow(), ASYMMETRIC)}


def pair(weight_spec: QuantSpec, activation: QuantSpec | None = None, dtype: torch.dtype = torch.float32, n: int = 44):
    """(input, weight in the packed layout, the same in the plain one)."""
    weight = torch.randn(n, 96, dtype=dtype)
    packed = AffineQuantizedTensor.from_float(weight, LinearSpec(weight_spec, activation, layout=PackedLayout()))
    return torch.randn(5, 96, dtype=dtype), packed, packed.to_layout(PlainLayout())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("granularity", [PerRow(), PerGroup(32)], ids=str)
@pytest.mark.parametrize("name", INTEGERS)
def test_the_bits_of_the_plain_layout(name, granularity, activation):
    for dtype in (torch.float32, torch.bfloat16):
        for mapping in (MappingType.SYMMETRIC, ASYMMETRIC):
            x, packed, plain = pair(QuantSpec(name, granularity, mapping), ACTIVATIONS[activation], dtype)
            with record_kernels() as ran:
                y = functional.linear(x, packed)
            kernel = "packed_weight" if activation == "none" else "packed_int8"
            assert ran[1] == f"{kernel}_mm"
            assert torch.equal(y, functional.linear(x, plain))


def test_real_zero_points_and_floating_point_codes():
    real = QuantSpec("uint4", PerGroup(32), ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False)
    for spec in (real, QuantSpec("float6_e3m2", zero_point_domain=ZeroPointDomain.NONE)):
        x, packed, plain = pair(spec)
        assert torch.equal(functional.linear(x, packed), functional.linear(x, plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [QuantSpec("uint4", PerGroup(32), ASYMMETRIC), QuantSpec("int3")], ids=str)
def test_transposed(spec, dtype):
    """What the gradient of the input, and experts stored (K, N), need; cut along the other axis."""
    _, packed, _ = pair(spec, dtype=dtype)
    grad = torch.randn(7, 44, dtype=dtype)
    with record_kernels() as ran:
        y = grad @ packed
    assert ran == ["linear:packed_weight_mm", "packed_weight_mm"]
    error = compute_error(reference.linear(grad, packed.t(), None), y)
    assert error > (40 if dtype == torch.bfloat16 else 110)


def test_slices(monkeypatch):
    """Several slices, the last one shorter; no more than a slice is ever unpacked."""
    rows = []
    read = RowsInSlices.__call__
    spy = lambda self, start, stop: rows.append(len(self.packed[start:stop])) or read(self, start, stop)  # noqa: E731
    monkeypatch.setattr(RowsInSlices, "__call__", spy)
    for activation in (None, TOKEN):
        rows.clear()
        spec = LinearSpec(QuantSpec("int4", PerGroup(32)), activation, layout=PackedLayout())
        packed = AffineQuantizedTensor.from_float(torch.randn(1100, 2048), spec)
        x = torch.randn(3, 2048)
        assert torch.equal(functional.linear(x, packed), functional.linear(x, packed.to_layout(PlainLayout())))
        assert rows == [512, 512, 76]
    x = torch.randn(3, 1100)
    weight = packed.with_activation(None)
    assert_same_product(x @ weight, x @ weight.dequantize(), x, weight.dequantize().t())


@pytest.mark.parametrize("name", INTEGERS)
def test_rows_in_slices(name):
    """The codes of `unpack_codes`, also of rows that are not whole groups, and of shorter and longer slices."""
    kind = qdtype(name)
    for length in (8, 19, 96):
        codes = torch.randint(int(kind.quant_min), int(kind.quant_max) + 1, (11, length), dtype=kind.storage)
        read = RowsInSlices(pack_codes(codes, kind), kind, length)
        for start, stop in ((0, 4), (4, 8), (8, 12), (11, 15), (1, 11)):
            assert torch.equal(read(start, stop), codes[start:stop])
            assert torch.equal(read(start, stop), unpack_codes(read.packed[start:stop], kind, length))


@pytest.mark.parametrize("op, arguments", [
    ("packed_weight_mm", (torch.randn(3, 32), pack_codes(torch.ones(12, 32, dtype=torch.uint8), qdtype("uint4")), 12,
                          -1, torch.rand(12, 1), torch.ones(12, 1, dtype=torch.uint8), "uint4", 0.0, 15.0, "INT")),
    ("packed_weight_mm", (torch.randn(3, 32), pack_codes(torch.ones(12, 32, dtype=torch.uint8), qdtype("uint4"), 0), 12,
                          -2, torch.rand(12, 1), None, "uint4", 0.0, 15.0, "NONE")),
    ("packed_int8_mm", (torch.ones(3, 32, dtype=torch.int8), torch.rand(3, 1), None,
                        pack_codes(torch.ones(8, 32, dtype=torch.int8), qdtype("int3")), torch.rand(8, 2), None, "int3",
                        torch.float32)),
])  # fmt: skip
def test_operators_are_well_formed(op, arguments):
    torch.library.opcheck(getattr(torch.ops.qtorch, op).default, arguments)
