"""Packing of sub-byte codes into int32 words and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtorch.dtypes.serialize import can_pack, pack_to_int32, unpack_from_int32
from qtorch.primitives import QDType, qdtype

PACKABLE = [qdtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (1, 2, 4)]
BYTES = [qdtype("int8"), qdtype("uint8")]


def random_codes(shape: tuple[int, ...], dtype: QDType, seed: int = 0) -> torch.Tensor:
    low, high = int(dtype.quant_min), int(dtype.quant_max)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype.storage)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(PACKABLE + BYTES),
    rows=st.lists(st.integers(0, 3), max_size=2),
    length=st.integers(0, 70),
    seed=st.integers(0, 1000),
)
def test_unpacking_undoes_packing(dtype: QDType, rows: list[int], length: int, seed: int) -> None:
    codes = random_codes((*rows, length), dtype, seed)
    packed = pack_to_int32(codes, dtype)
    assert packed.dtype == torch.int32
    assert packed.shape == (*rows, -(-length * dtype.bits // 32))
    unpacked = unpack_from_int32(packed, dtype, length)
    assert unpacked.dtype == dtype.storage
    assert torch.equal(unpacked, codes)


@pytest.mark.parametrize("dtype", PACKABLE + BYTES, ids=str)
def test_the_first_code_is_in_the_lowest_bits(dtype: QDType) -> None:
    count = 32 // dtype.bits
    codes = random_codes((5, count), dtype)
    words = pack_to_int32(codes, dtype)
    for row, word in zip(codes.tolist(), words.flatten().tolist()):
        number = sum((code - int(dtype.quant_min)) << (dtype.bits * i) for i, code in enumerate(row))
        assert word % 2**32 == number


def test_a_word_written_out() -> None:
    codes = torch.tensor([-8, -7, -6, -5, -4, -3, -2, 7], dtype=torch.int8)
    assert pack_to_int32(codes, qdtype("int4")).item() == 0xF6543210 - 2**32
    assert pack_to_int32(codes[:3], qdtype("int4")).item() == 0x210


@pytest.mark.parametrize("dtype", PACKABLE + BYTES, ids=str)
def test_extreme_codes(dtype: QDType) -> None:
    for code in (dtype.quant_min, dtype.quant_max):
        codes = torch.full((3, 33), code, dtype=dtype.storage)
        assert torch.equal(unpack_from_int32(pack_to_int32(codes, dtype), dtype, 33), codes)


def test_padding_is_zero_bits() -> None:
    packed = pack_to_int32(torch.full((1, 3), 7, dtype=torch.int8), qdtype("int4"))
    padding = unpack_from_int32(packed, qdtype("int4"), 8)[0, 3:]
    assert torch.equal(padding, torch.full((5,), -8, dtype=torch.int8))


def test_codes_need_not_be_contiguous() -> None:
    codes = random_codes((16, 5), qdtype("uint4")).T
    packed = pack_to_int32(codes, qdtype("uint4"))
    assert torch.equal(packed, pack_to_int32(codes.contiguous(), qdtype("uint4")))


def test_what_fills_a_word_exactly() -> None:
    names = [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 9)]
    packable = [name for name in names if can_pack(qdtype(name))]
    assert packable == ["int1", "int2", "int4", "uint1", "uint2", "uint4"]
    assert not can_pack(qdtype("float8_e4m3fn"))
