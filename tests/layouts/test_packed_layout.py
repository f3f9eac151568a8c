"""Codes of few bits in bytes: packing, and the layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, MappingType, PackedLayout, PerGroup, PlainLayout, QuantSpec
from qtorch.primitives import QDType, qdtype
from qtorch.primitives.layouts.packed import RowsInSlices, can_pack_bits, pack_bits, pack_codes, unpack_bits
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
        (w[1], -1), (w[:, 3:9], -1), (w.transpose(1, 2), -2), (w.transpose(0, 2), -3), (w.transpose(1, 2)[2], -2),
        (w.transpose(1, 2)[2].t(), -1), (w.reshape(128, 96), -1), (w[:, None], -1), (w[torch.tensor([2, 0])], -1),
        (w[..., 32:64], -1),
    ]:  # fmt: skip
        assert view.scheme.layout == PackedLayout(axis)
        assert view.qdata.numel() * 8 == view.numel() * w.scheme.weight.dtype.bits


@pytest.mark.usefixtures("torch_kernels")
def test_only_the_rows_asked_for_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    import qtorch.kernels.embedding as module

    sizes, unpack = [], module.unpack_codes
    monkeypatch.setattr(module, "unpack_codes", lambda codes, *args: sizes.append(len(codes)) or unpack(codes, *args))
    weight = quantized("uint4 group, packed")
    with qtorch.kernels.record_kernels() as ran:
        functional.embedding(torch.tensor([3, 1]), weight)
    assert (ran, sizes) == (["embedding:gather_packed_rows"], [2])


def test_what_it_cannot_hold_and_the_format() -> None:
    refuses(r"packs codes of 1 to 7 bits, the weight has int8", lambda: quantized("int8 row").to_layout(PackedLayout()))
    with pytest.raises(ValueError, match=r"of shape \(4,\) has no axis -2"):
        AffineQuantizedTensor.from_float(torch.randn(4), LinearSpec(QuantSpec("int4"), layout=PackedLayout(-2)))
    refuses("counted from the end and must be negative, got 0", lambda: PackedLayout(0))
    assert (repr(PackedLayout()), repr(PackedLayout(-2))) == ("PackedLayout()", "PackedLayout(axis=-2)")
    # No axis is left to pack along.
    w = quantized("uint4 group, packed")
    assert w[3, 5].scheme.layout == PlainLayout()
    assert torch.equal(w[3, 5].dequantize(), w.dequantize()[3, 5])
    w = AffineQuantizedTensor.from_float(
        torch.randn(32, 64), LinearSpec(QuantSpec("int5", PerGroup(16)), TOKEN, layout=PackedLayout())
    )
    x = torch.randn(3, 32)
    with pytest.warns(UserWarning, match="runs the reference implementation"):
        y = x @ w
    assert torch.equal(y, x @ w.to_layout(PlainLayout()))
    assert pack_bits(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), 4).tolist() == [0x21, 0x43, 0x65, 0x87]
    assert pack_bits(torch.tensor([5, 0, 0, 0, 0, 0, 0, 4]), 3).tolist() == [0x01, 0x00, 0b10000001]
    assert pack_codes(torch.tensor([-4, 3], dtype=torch.int8), qdtype("int3")).tolist() == [0b1100, 0, 0b10]
    assert all(can_pack_bits(dtype) for dtype in SMALL)
    assert not any(can_pack_bits(qdtype(name)) for name in ("int8", "uint8", "int16", "float8_e4m3fn"))
    for bits in (0, 9):
        refuses(f"takes codes of 1 to 8 bits, got {bits}", lambda bits=bits: pack_bits(torch.zeros(8), bits))
    with pytest.raises(ValueError, match=r"13 codes of 3 bits take 6 bytes, axis 1 of \(2, 5\) has 5"):
        unpack_bits(torch.zeros(2, 5, dtype=torch.uint8), 3, 13)
    packed = pack_bits(torch.empty(3, 13, dtype=torch.uint8, device="meta"), 3)
    assert packed.shape == (3, 6)
    assert unpack_bits(packed, 3, 13).shape == (3, 13)


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
            assert torch.equal(
                read(start, stop), qtorch.primitives.layouts.packed.unpack_codes(read.packed[start:stop], kind, length)
            )


SMALL = [qdtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in range(1, 8)]


def random_codes(shape: tuple[int, ...], dtype: QDType) -> torch.Tensor:
    return torch.randint(int(dtype.quant_min), int(dtype.quant_max) + 1, shape).to(dtype.storage)


@pytest.mark.parametrize("bits", range(1, 9))
def test_true_size_and_format(bits: int) -> None:
    """Byte i of a part holds its items i, i + 1, ... of every group; parts of 4, 2 and 1 bits follow each other."""
    codes = torch.randint(0, 2**bits, (16,), dtype=torch.uint8)
    packed = pack_bits(codes, bits).tolist()
    assert len(packed) == 16 * bits // 8
    if bits == 8:
        assert packed == codes.tolist()
        return
    items, low, wanted = codes.reshape(8, 2).tolist(), 0, []
    for part in (4, 2, 1):
        if bits & part:
            per_byte = 8 // part
            wanted += [
                sum(((items[i * per_byte + s][g] >> low) % 2**part) << (part * s) for s in range(per_byte))
                for i in range(part)
                for g in range(2)
            ]
            low += part
    assert packed == wanted


@pytest.mark.parametrize("bits", [1, 3, 4, 7, 8])
def test_strided_codes_and_wide_dtypes(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (9, 16))
    packed = pack_bits(codes.T, bits)
    assert torch.equal(packed, pack_bits(codes.T.contiguous().to(torch.uint8), bits))
    assert bits == 8 or packed.shape[1] == qtorch.primitives.layouts.packed_length(9, bits) == 2 * bits
    assert torch.equal(unpack_bits(packed, bits, 9, dtype=torch.int64), codes.T)
    assert torch.equal(unpack_bits(packed.T, bits, 9, 0), codes)


@pytest.mark.slow
def test_traces_without_a_break() -> None:
    def round_trip(codes: torch.Tensor) -> torch.Tensor:
        return unpack_bits(pack_bits(codes, 3), 3, codes.shape[-1])

    compiled = torch.compile(round_trip, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (9, 24, 31):
        codes = torch.randint(0, 8, (3, length), dtype=torch.uint8)
        assert torch.equal(compiled(codes), codes)
