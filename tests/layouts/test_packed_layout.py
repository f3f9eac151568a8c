"""PackedLayout: what is only true of it; the rest of these tests run over it as over every scheme."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from qtorch import AffineQuantizedTensor, LinearSpec, MappingType, PackedLayout, PerGroup, PlainLayout, QuantSpec
from qtorch.kernels import record_kernels
from qtorch.primitives import qdtype
from qtorch.primitives.layouts.packed import RowsInSlices, pack_codes, unpack_codes
from tests.dtypes.specs import ASYMMETRIC, PACKED, TOKEN, quantized
from tests.refusals import refuses

DTYPES = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from([*DTYPES, "float6_e3m2", "float4_e2m1"]),
    shape=st.lists(st.integers(0, 19), min_size=1, max_size=3),
    axis=st.integers(-3, -1),
)
def test_a_bijection_of_every_width_and_size(dtype: str, shape: list[int], axis: int) -> None:
    mapping = MappingType.SYMMETRIC if dtype.startswith("float") else ASYMMETRIC
    w = AffineQuantizedTensor.from_float(torch.randn(shape), QuantSpec(dtype, mapping=mapping))
    packed = w.to_layout(PackedLayout(max(axis, -len(shape))))
    assert packed.shape == w.shape
    for a, b in zip(packed.plain(), w.plain()):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("torch_kernels")  # compiled ones may take different ways, with sums in another order
def test_the_same_bits_as_plain(name: str, dtype: torch.dtype) -> None:
    packed = quantized(name, 40, 96, dtype=dtype)
    plain = packed.to_layout(PlainLayout())
    x, bias, ids = torch.randn(5, 96, dtype=dtype), torch.randn(40, dtype=dtype), torch.tensor([[3, 39], [0, 3]])
    assert torch.equal(functional.linear(x, packed, bias), functional.linear(x, plain, bias))
    assert torch.equal(functional.embedding(ids, packed), functional.embedding(ids, plain))
    assert torch.equal(packed.dequantize(), plain.dequantize())
    assert torch.equal(packed[8:24, 32:64].dequantize(), plain[8:24, 32:64].dequantize())
    assert torch.equal(packed[ids[0]].dequantize(), plain[ids[0]].dequantize())


@pytest.mark.parametrize("name", PACKED)
def test_views_keep_codes_packed(name: str) -> None:
    w = quantized(name, 4, 32, 96)
    for view, axis in [
        (w[1], -1),
        (w[:, 3:9], -1),
        (w.transpose(1, 2), -2),
        (w.transpose(0, 2), -3),
        (w.transpose(1, 2)[2], -2),
        (w.transpose(1, 2)[2].t(), -1),
        (w.reshape(128, 96), -1),
        (w[:, None], -1),
        (w[torch.tensor([2, 0])], -1),
        (w[..., 32:64], -1),
    ]:
        assert view.scheme.layout == PackedLayout(axis)
        assert view.qdata.numel() * 8 == view.numel() * w.scheme.weight.dtype.bits


@pytest.mark.usefixtures("torch_kernels")
def test_only_the_rows_asked_for_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    import qtorch.kernels.embedding as module

    sizes, unpack = [], module.unpack_codes
    monkeypatch.setattr(
        module, "unpack_codes", lambda packed, *args: sizes.append(len(packed)) or unpack(packed, *args)
    )
    weight = quantized("uint4 group, packed")
    with record_kernels() as ran:
        functional.embedding(torch.tensor([3, 1]), weight)
    assert (ran, sizes) == (["embedding:gather_packed_rows"], [2])


def test_what_it_cannot_hold() -> None:
    refuses(r"packs codes of 1 to 7 bits, the weight has int8", lambda: quantized("int8 row").to_layout(PackedLayout()))
    with pytest.raises(ValueError, match=r"of shape \(4,\) has no axis -2"):
        AffineQuantizedTensor.from_float(torch.randn(4), LinearSpec(QuantSpec("int4"), layout=PackedLayout(-2)))
    refuses("counted from the end and must be negative, got 0", lambda: PackedLayout(0))
    assert (repr(PackedLayout()), repr(PackedLayout(-2))) == ("PackedLayout()", "PackedLayout(axis=-2)")


def test_an_element_is_in_the_plain_layout() -> None:
    """No axis is left to pack along."""
    w = quantized("uint4 group, packed")
    assert w[3, 5].scheme.layout == PlainLayout()
    assert torch.equal(w[3, 5].dequantize(), w.dequantize()[3, 5])


def test_transposed_with_activations_runs_the_reference() -> None:
    w = AffineQuantizedTensor.from_float(
        torch.randn(32, 64), LinearSpec(QuantSpec("int5", PerGroup(16)), TOKEN, layout=PackedLayout())
    )
    x = torch.randn(3, 32)
    with pytest.warns(UserWarning, match="runs the reference implementation"):
        y = x @ w
    assert torch.equal(y, x @ w.to_layout(PlainLayout()))


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("activation", [None, TOKEN])
def test_no_more_than_a_slice_is_unpacked(activation: QuantSpec | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slices, the last one shorter."""
    rows, read = [], RowsInSlices.__call__
    spy = lambda self, start, stop: rows.append(len(self.packed[start:stop])) or read(self, start, stop)  # noqa: E731
    monkeypatch.setattr(RowsInSlices, "__call__", spy)
    spec = LinearSpec(QuantSpec("int4", PerGroup(32)), activation, layout=PackedLayout())
    packed, x = AffineQuantizedTensor.from_float(torch.randn(1100, 2048), spec), torch.randn(3, 2048)
    assert torch.equal(functional.linear(x, packed), functional.linear(x, packed.to_layout(PlainLayout())))
    assert rows == [512, 512, 76]


@pytest.mark.parametrize("name", DTYPES)
def test_rows_in_slices(name: str) -> None:
    """The codes of `unpack_codes`, also of rows that are not whole groups, and of shorter and longer slices."""
    kind = qdtype(name)
    for length in (8, 19, 96):
        codes = torch.randint(int(kind.quant_min), int(kind.quant_max) + 1, (11, length), dtype=kind.storage)
        read = RowsInSlices(pack_codes(codes, kind), kind, length)
        for start, stop in ((0, 4), (4, 8), (8, 12), (11, 15), (1, 11)):
            assert torch.equal(read(start, stop), codes[start:stop])
            assert torch.equal(read(start, stop), unpack_codes(read.packed[start:stop], kind, length))
