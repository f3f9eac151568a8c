"""The signal to quantization noise ratio."""

import math

import pytest
import torch

from qtorch.primitives import compute_error


@pytest.mark.parametrize("decibels", [-6.0, 0.0, 20.0, 60.0])
def test_noise_of_known_strength(decibels: float) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    y = x * (1 + 10 ** (-decibels / 20))
    assert compute_error(x, y).item() == pytest.approx(decibels, abs=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_computed_in_fp32(dtype: torch.dtype) -> None:
    # In fp16 the squared norm of x would overflow.
    x = torch.full((2000,), 1024.0, dtype=dtype)
    error = compute_error(x, x - 8)
    assert error.dtype == torch.float32
    assert error.item() == pytest.approx(20 * math.log10(128), abs=1e-3)


def test_scaling_both_changes_nothing() -> None:
    x, noise = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    y = x + noise / 16
    assert torch.equal(compute_error(x, y), compute_error(4 * x, 4 * y))


def test_edges() -> None:
    ones = torch.ones(3, requires_grad=True)
    assert compute_error(ones, ones) == math.inf
    assert compute_error(torch.zeros(3), ones) == -math.inf
    assert not compute_error(ones, ones * 2).requires_grad
    assert compute_error(ones, ones * 2).shape == ()
