"""Rounding to integers, to nearest even and stochastic."""

import pytest
import torch

from qtorch.primitives import Rounding, round_to_integer

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def stochastic(x: torch.Tensor, seed: int) -> torch.Tensor:
    return round_to_integer(x, Rounding.STOCHASTIC, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nearest_takes_ties_to_even(dtype: torch.dtype) -> None:
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49, 0.51], dtype=dtype)
    wanted = torch.tensor([-2.0, -2.0, 0.0, 0.0, 2.0, 2.0, 0.0, 1.0], dtype=dtype)
    assert torch.equal(round_to_integer(x), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_gives_floor_or_ceil(dtype: torch.dtype) -> None:
    x = (torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    rounded = stochastic(x, 1)
    assert rounded.dtype == dtype
    assert ((rounded == x.floor()) | (rounded == x.ceil())).all()
    assert (rounded == x.floor()).any()
    assert (rounded == x.ceil()).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_never_moves_an_integer(dtype: torch.dtype) -> None:
    x = torch.tensor([-128.0, -1, 0, 1, 127, 2048, torch.finfo(dtype).max], dtype=dtype)
    x = x.repeat(1000, 1)
    assert torch.equal(stochastic(x, 0), x)


def test_stochastic_never_moves_an_integer_though_u_be_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    x = torch.tensor([-2.0, -0.5, 0.0, 0.5, 3.0])
    rounded = round_to_integer(x, Rounding.STOCHASTIC)
    assert torch.equal(rounded, x.ceil())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.001, -0.001, 0.25, -0.75, 3.5, 100.3, -100.3])
def test_stochastic_is_unbiased(value: float, dtype: torch.dtype) -> None:
    x = torch.full((200_000,), value, dtype=dtype)
    rounded = stochastic(x, 0).double()
    fraction = (x[0].double() - x[0].double().floor()).item()
    standard_error = (fraction * (1 - fraction) / x.numel()) ** 0.5
    assert abs((rounded.mean() - x[0].double()).item()) < 4 * standard_error + 1e-12


def test_random_numbers_are_those_of_the_generator() -> None:
    """Of the default one, if there is none; a generator leaves that alone."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10
    torch.manual_seed(3)
    assert torch.equal(stochastic(x, 5), stochastic(x, 5))
    assert not torch.equal(stochastic(x, 5), stochastic(x, 6))
    first, second = (round_to_integer(x, Rounding.STOCHASTIC) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(round_to_integer(x, Rounding.STOCHASTIC), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 0.5)
    assert stochastic(x, 0).shape == round_to_integer(x).shape == shape
