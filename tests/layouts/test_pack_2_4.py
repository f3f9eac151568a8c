"""2:4 sparsity: pruning by its definition, and a packing that is an exact inverse on every pattern and size."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtorch.primitives import compute_error, is_2_4, prune_2_4
from qtorch.primitives.layouts.semi_sparse import pack_2_4, packed_length_2_4, unpack_2_4

DTYPES = [torch.int8, torch.float8_e4m3fn, torch.uint8]
shapes = st.lists(st.integers(0, 37), min_size=1, max_size=3)


def naive_prune(row: list[float]) -> list[float]:
    kept = []
    for start in range(0, len(row), 4):
        run = row[start : start + 4]
        order = sorted(range(len(run)), key=lambda i: (-abs(run[i]), i))
        kept += [x if i in order[:2] else 0.0 for i, x in enumerate(run)]
    return kept


def sparse_bytes(shape: list[int], seed: int) -> Tensor:
    """Any bytes at two random positions of each four, zero or not; zero elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    where = prune_2_4(torch.rand(shape, generator=generator) + 1) != 0
    return torch.randint(0, 256, shape, generator=generator).mul(where).to(torch.uint8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(-3, 3), max_size=23))
def test_prune_keeps_the_two_largest_of_each_four_the_first_of_equals(row: list[int]) -> None:
    assert prune_2_4(torch.tensor(row, dtype=torch.float32)).tolist() == naive_prune([float(x) for x in row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pruning_a_normal_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 64, 130).to(dtype)
    pruned = prune_2_4(weight)
    assert (pruned.shape, pruned.dtype) == (weight.shape, dtype)
    assert pruned.is_contiguous()
    assert is_2_4(pruned)
    assert not is_2_4(weight)
    assert torch.equal(prune_2_4(pruned), pruned)
    # Nothing in a last run of two is pruned: 66 of 130 stay.
    assert int((pruned != 0).sum()) == 3 * 64 * 66
    assert torch.equal(pruned[pruned != 0], weight[pruned != 0])
    assert 8 < compute_error(weight, pruned) < 10


def test_what_is_pruned_is_a_positive_zero() -> None:
    pruned = prune_2_4(-torch.arange(1.0, 9))
    assert pruned.tolist() == [0, 0, -3, -4, 0, 0, -7, -8]
    assert not pruned[:2].signbit().any()


def test_is_2_4() -> None:
    assert is_2_4(torch.tensor([0, 1, 2, 0, 3, 0, 0, 4]))
    # Runs start at multiples of four.
    assert not is_2_4(torch.tensor([1, 2, 3, 0]))
    assert is_2_4(torch.tensor([0, 0, 1, 2, 3, 4, 0, 0]))
    assert is_2_4(torch.tensor([[1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]]))
    assert not is_2_4(torch.tensor([0, 0, 0, 0, 1, 1, 1]))
    assert is_2_4(torch.tensor([-0.0, 1, 2, -0.0])), "a negative zero is zero"
    assert is_2_4(torch.empty(3, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_run_that_is_2_4(dtype: torch.dtype) -> None:
    """Every set of positions, with bytes of every kind: 0x80 is -128 and the negative zero of float8, 0x7f its NaN."""
    runs = {
        tuple(a if k == i else b if k == j else 0 for k in range(4))
        for i, j in itertools.combinations(range(4), 2)
        for a, b in itertools.product([0, 1, 0x7F, 0x80, 0xFF], repeat=2)
    }
    codes = torch.tensor(sorted(runs), dtype=torch.uint8).flatten().view(dtype)
    unpacked = unpack_2_4(pack_2_4(codes), len(codes), dtype)
    assert unpacked.dtype == dtype
    assert torch.equal(unpacked.view(torch.uint8), codes.view(torch.uint8))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(shape=shapes, axis=st.integers(-3, -1), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_unpack_is_the_inverse_of_pack(shape: list[int], axis: int, dtype: torch.dtype, seed: int) -> None:
    axis = max(axis, -len(shape))
    codes = sparse_bytes(shape, seed).movedim(-1, axis)
    length = codes.shape[axis]
    packed = pack_2_4(codes.view(dtype), axis)
    assert packed.dtype == torch.uint8
    assert packed.shape[axis] == packed_length_2_4(length) == -(-length // 16) * 10
    assert torch.equal(unpack_2_4(packed, length, dtype, axis).view(torch.uint8), codes)


def test_the_format() -> None:
    """16 codes: the first of each run, the second of each, then the positions, as `pack_bits` has them."""
    codes = torch.tensor([0, 9, 0, 8, 7, 6, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0], dtype=torch.int8)
    # Items 2 of `pack_bits` of 8 codes at 2 bits, G = 1: byte i holds codes 4 i .. 4 i + 3, the first lowest.
    firsts, seconds = 1 | 0 << 2 | 0 << 4 | 0 << 6, 3 | 1 << 2 | 2 << 4 | 1 << 6
    assert pack_2_4(codes).tolist() == [9, 7, 0, 0, 8, 6, 5, 0, firsts, seconds]


def test_errors() -> None:
    codes = torch.ones(2, 8, dtype=torch.int8)
    codes[1, 4:6] = 0
    with pytest.raises(ValueError, match=r"\(2, 8\) are not 2:4 sparse along axis -1: 3 of 8 runs of four have more"):
        pack_2_4(codes)
    with pytest.raises(ValueError, match="more than two that are not zero"):
        pack_2_4(torch.tensor([1.0, 2.0, -0.0, 0.0]).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"17 codes, 2:4 sparse, take 20 bytes, axis -1 of \(3, 10\) has 10"):
        unpack_2_4(torch.zeros(3, 10, dtype=torch.uint8), 17, torch.int8)
