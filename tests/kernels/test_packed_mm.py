"""Linear on the packed layout: the bits of the plain one for every scheme, transposed weights, operators."""

import pytest
import torch
from torch.nn import functional

from qtorch import AffineQuantizedTensor, LinearSpec, MappingType, PackedLayout, PerGroup, PerRow, PlainLayout
from qtorch.primitives import QuantSpec, qdtype
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
