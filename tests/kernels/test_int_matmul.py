"""int_matmul is exact, whichever way it is assembled."""

import importlib

import pytest
import torch

from qtorch.kernels import features, int_matmul, int_scaled_matmul, record_kernels

module = importlib.import_module("qtorch.kernels.ops.int_matmul")

SHAPES = [(1, 1, 1), (3, 1, 5), (3, 5, 7), (1, 1024, 4), (17, 1025, 3), (2, 4097, 33), (0, 8, 4), (4, 8, 0), (3, 0, 5)]


def random_codes(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("m, k, n", SHAPES)
@pytest.mark.parametrize("multiply", [int_matmul, module._sliced], ids=["chosen", "sliced"])
def test_exact(m, k, n, multiply):
    a, b = random_codes(m, k), random_codes(n, k).t()
    result = multiply(a, b)
    assert result.dtype == torch.int32
    assert torch.equal(result.long(), a.long() @ b.long())


@pytest.mark.parametrize("multiply", [int_matmul, module._sliced], ids=["chosen", "sliced"])
def test_exact_at_the_largest_sums(multiply):
    """Every product is 128 * 128: the case in which a slice of more than 1024 terms would leave fp32's integers."""
    a, b = torch.full((2, 5000), -128, dtype=torch.int8), torch.full((5000, 3), -128, dtype=torch.int8)
    assert (multiply(a, b) == 5000 * 128 * 128).all()
    odd = b.clone()
    odd[0] = -127
    assert (multiply(a, odd) == 5000 * 128 * 128 - 128).all()


def test_sums_that_an_int32_need_not_hold():
    a, b = torch.full((2, 140_000), -128, dtype=torch.int8), torch.full((140_000, 3), -128, dtype=torch.int8)
    assert (int_scaled_matmul(a, b, torch.ones(2, 1, dtype=torch.float64)) == 140_000 * 128 * 128).all()
    with pytest.raises(ValueError, match="need not hold sums of 140000 products"):
        int_matmul(a, b)
    longest = module.int32_terms()
    assert longest * 128 * 128 < 2**31 <= (longest + 1) * 128 * 128
    assert (int_matmul(a[:, :longest], b[:longest]) == longest * 128 * 128).all()


def test_any_strides():
    a, b = random_codes(40, 24)[::2, 4:20], random_codes(16, 9)
    for other in (b, b.t().contiguous().t()):
        assert torch.equal(int_matmul(a, other).long(), a.long() @ b.long())


@pytest.mark.parametrize("vnni", [True, False])
def test_the_choice_follows_the_processor(vnni, monkeypatch):
    monkeypatch.setattr(features, "cpu_has", lambda feature: vnni)
    with record_kernels() as ran:
        int_matmul(random_codes(2, 8), random_codes(8, 2))
    assert ran == ["int_matmul", "int_matmul.vnni" if vnni else "int_matmul.sliced"]


def test_scaled():
    a, b, scale = random_codes(3, 8), random_codes(8, 4), torch.rand(3, 1)
    expected = (a.long() @ b.long()).float() * scale
    torch.testing.assert_close(int_scaled_matmul(a, b, scale), expected, rtol=1e-6, atol=0)


def test_errors():
    with pytest.raises(ValueError, match=r"takes int8 matrices, got torch.uint8 and torch.int8"):
        int_matmul(random_codes(2, 3).view(torch.uint8), random_codes(3, 2))
    with pytest.raises(ValueError, match=r"takes \(M, K\) and \(K, N\), got \(2, 3\) and \(4, 2\)"):
        int_matmul(random_codes(2, 3), random_codes(4, 2))
