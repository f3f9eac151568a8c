"""Both packings of codes in int32 words, and telling them apart."""

import pytest
import torch

from qtorch.checkpoint.formats.blocks import WORD, dense_words, padded_words, unpack_either
from qtorch.primitives.layouts.packed import pack_dense, unpack_dense

BITS = range(1, 9)


def codes_of(rows: int, length: int, bits: int) -> torch.Tensor:
    torch.manual_seed(bits)
    return torch.randint(0, 2**bits, (rows, length), dtype=torch.uint8)


def pack_padded(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """As compressed-tensors did up to version 0.17."""
    each = WORD // bits
    spread = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each)).unflatten(1, (-1, each))
    return (spread.long() << torch.arange(each) * bits).sum(2).to(torch.int32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [1, 7, 31, 32, 33, 160, 999])
def test_round_trips(bits: int, length: int) -> None:
    codes = codes_of(3, length, bits)
    for packed, words in ((pack_dense(codes, bits), dense_words), (pack_padded(codes, bits), padded_words)):
        assert packed.dtype is torch.int32
        assert packed.shape == (3, words(length, bits))
    assert torch.equal(unpack_dense(pack_dense(codes, bits), bits, length), codes)


@pytest.mark.parametrize("bits", BITS)
def test_the_words_are_those_of_the_package(bits: int) -> None:
    package = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")

    codes = codes_of(5, 77, bits)
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(pack_dense(codes, bits), package.pack_to_int32(signed, bits))
    assert torch.equal(pack_dense(codes.t(), bits).t(), package.pack_to_int32(signed, bits, packed_dim=0))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [160, 192, 4096])
def test_the_shape_tells_the_packing_of_long_rows(bits: int, length: int) -> None:
    codes = codes_of(2, length, bits)
    assert (dense_words(length, bits) == padded_words(length, bits)) == (32 % bits == 0)
    for dense in (None, True, False):  # which is not asked
        assert torch.equal(unpack_either(pack_dense(codes, bits), bits, length, dense), codes)
        assert torch.equal(unpack_either(pack_padded(codes, bits), bits, length, dense), codes)


@pytest.mark.parametrize(("bits", "length"), [(3, 20), (5, 7), (6, 12), (7, 6)])
def test_the_version_or_the_padding_tells_the_packing_of_short_rows(bits: int, length: int) -> None:
    assert dense_words(length, bits) == padded_words(length, bits)
    codes = codes_of(40, length, bits)
    dense, padded = pack_dense(codes, bits), pack_padded(codes, bits)
    assert not torch.equal(dense, padded)
    assert torch.equal(unpack_either(dense, bits, length, True), codes)
    assert torch.equal(unpack_either(padded, bits, length, False), codes)
    assert torch.equal(unpack_either(dense, bits, length, None), codes)
    assert torch.equal(unpack_either(padded, bits, length, None), codes)


def test_nibbles_and_other_shapes() -> None:
    codes = codes_of(3, 8, 4)
    packed = pack_dense(codes, 4).view(torch.uint8)
    assert torch.equal(unpack_dense(packed, 4, 8), codes)
    assert int(packed[0, 0]) == int(codes[0, 0]) + 16 * int(codes[0, 1])
    with pytest.raises(ValueError, match=r"rows of 64 codes of 3 bits take 6 words, or 7 up to version 0.17, got 5"):
        unpack_either(torch.zeros(2, 5, dtype=torch.int32), 3, 64, None)
    with pytest.raises(ValueError, match="rows of int32"):
        unpack_either(torch.zeros(2, 6, dtype=torch.int64), 3, 64, None)
