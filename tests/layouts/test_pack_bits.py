"""Packing of codes of 1 to 8 bits to their true size, along any axis, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtorch.primitives import QDType, qdtype
from qtorch.primitives.layouts.packed import (
    can_pack_bits,
    pack_bits,
    pack_codes,
    packed_length,
    unpack_bits,
)

SMALL = [qdtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in range(1, 8)]


def random_codes(shape: tuple[int, ...], dtype: QDType) -> torch.Tensor:
    return torch.randint(int(dtype.quant_min), int(dtype.quant_max) + 1, shape).to(dtype.storage)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), bits=st.integers(1, 8), shape=st.lists(st.integers(0, 20), min_size=1, max_size=3))
def test_unpacking_undoes_packing(data: st.DataObject, bits: int, shape: list[int]) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    packed = pack_bits(codes, bits, axis)
    wanted = list(shape)
    wanted[axis] = packed_length(shape[axis], bits) if bits < 8 else shape[axis]
    assert (packed.dtype, list(packed.shape)) == (torch.uint8, wanted)
    assert torch.equal(unpack_bits(packed, bits, shape[axis], axis), codes)
    # The axis is only where the codes lie.
    assert torch.equal(packed.movedim(axis, -1), pack_bits(codes.movedim(axis, -1), bits))


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


def test_written_out() -> None:
    assert pack_bits(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), 4).tolist() == [0x21, 0x43, 0x65, 0x87]
    assert pack_bits(torch.tensor([5, 0, 0, 0, 0, 0, 0, 4]), 3).tolist() == [0x01, 0x00, 0b10000001]
    assert pack_codes(torch.tensor([-4, 3], dtype=torch.int8), qdtype("int3")).tolist() == [0b1100, 0, 0b10]


@pytest.mark.parametrize("bits", [1, 3, 4, 7])
def test_strided_codes_and_wide_dtypes(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (9, 16))
    packed = pack_bits(codes.T, bits)
    assert torch.equal(packed, pack_bits(codes.T.contiguous().to(torch.uint8), bits))
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


def test_on_the_meta_device() -> None:
    packed = pack_bits(torch.empty(3, 13, dtype=torch.uint8, device="meta"), 3)
    assert packed.shape == (3, 6)
    assert unpack_bits(packed, 3, 13).shape == (3, 13)


def test_what_is_refused() -> None:
    for bits in (0, 9):
        with pytest.raises(ValueError, match=f"takes codes of 1 to 8 bits, got {bits}"):
            pack_bits(torch.zeros(8), bits)
    with pytest.raises(ValueError, match=r"13 codes of 3 bits take 6 bytes, axis 1 of \(2, 5\) has 5"):
        unpack_bits(torch.zeros(2, 5, dtype=torch.uint8), 3, 13)


def test_what_gets_smaller() -> None:
    assert all(can_pack_bits(dtype) for dtype in SMALL)
    assert not any(can_pack_bits(qdtype(name)) for name in ("int8", "uint8", "int16", "float8_e4m3fn"))
