"""BlockedTensor: any size and shape, written, moved, saved and sharded between blocks."""

import pytest
import torch

from qtorch.dtypes.blocked_tensor import BlockedScheme, BlockedTensor
from qtorch.kernels.ops.adam import FORMS
from qtorch.primitives import LinearSpec
from tests.refusals import refuses

SHAPES = [((7, 100), 64, False), ((5000,), 256, True), ((3, 5, 9), 32, True), ((4, 3, 5, 7), 53, False), ((), 8, True)]
ERRORS = {"8": (1e-4, 0.03), "4": (1e-2, 0.35), "float8": (1e-3, 0.08)}
"""Least and most relative error of random numbers."""


def scheme(form: str, root: bool, shape: tuple[int, ...], block: int, flat: bool) -> BlockedScheme:
    spec = FORMS[form].second if root else FORMS[form].first
    return BlockedScheme(LinearSpec(spec), shape, torch.float32, block, flat, root)


def made(form: str, root: bool, shape: tuple[int, ...] = (6, 80), block: int = 40, flat: bool = False):
    x = torch.randn(shape)
    x = x.square() if root else x
    return x, BlockedTensor.quantized(x, scheme(form, root, shape, block, flat))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("shape, block, flat", SHAPES)
def test_values(form: str, root: bool, shape: tuple[int, ...], block: int, flat: bool) -> None:
    x, state = made(form, root, shape, block, flat)
    assert state.shape == shape
    assert state.dtype == torch.float32
    error = (state.dequantize() - x).norm() / x.norm()
    low, high = ERRORS[form]
    assert error <= high
    assert error >= low or not shape
    # Each block has a scale from its own largest value, which is exact.
    blocks = state.scheme.blocks
    values, exact = blocks.split(state.dequantize()), blocks.split(x)
    place = exact.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(values.gather(1, place), exact.gather(1, place), rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_roots_of_what_is_positive_are_not_zero(form: str) -> None:
    x = torch.tensor([[1.0, 1e-20, 0.0, 1e-12]])
    state = BlockedTensor.quantized(x, scheme(form, True, (1, 4), 4, False))
    assert (state.dequantize() > 0).tolist() == (x > 0).tolist()


@pytest.mark.parametrize("form", FORMS)
def test_writes(form: str) -> None:
    x, state = made(form, False)
    other = torch.zeros_like(state)
    other.copy_(state)
    assert torch.equal(other.dequantize(), state.dequantize())
    other.copy_(x)
    assert torch.equal(other.dequantize(), state.dequantize())
    # Codes of roots, even of the same kind, are converted.
    v, root = made(form, True)
    other.copy_(root)
    torch.testing.assert_close(other.dequantize(), v, rtol=0.6, atol=0.25)
    refuses("would lose its codes", lambda: torch.zeros(6, 80).copy_(state))


@pytest.mark.parametrize(
    "flat, shape, cuts", [(False, (6, 100), (1, 4)), (True, (12, 20), (2, 6)), (True, (5000,), (512, 4096))]
)
def test_parts_share_memory(flat: bool, shape: tuple[int, ...], cuts: tuple[int, int]) -> None:
    block = 40 if len(shape) == 2 else 256
    _, state = made("8", False, shape, block, flat)
    start, stop = cuts
    part = state[start:stop]
    assert torch.equal(part.dequantize(), state.dequantize()[start:stop])
    part.copy_(torch.ones(part.shape))
    assert (state.dequantize()[start:stop] == 1).all()
    assert (state.dequantize()[:start] != 1).all()
    assert torch.equal(state[stop:].dequantize(), state.dequantize()[stop:])


def test_refusals() -> None:
    _, state = made("8", False, (5000,), 256, True)
    refuses(r"cuts blocks of 256.*optim_bits=32", lambda: state[100:200])
    _, state = made("8", False)
    refuses("along axis 1", lambda: state[:, :40])
    refuses("state of an optimizer", lambda: state.t(), NotImplementedError)
    refuses("no view of shape", lambda: state.view(80, 6))
    refuses("takes floats of it", lambda: BlockedTensor.quantized(torch.zeros(3), state.scheme))


def test_a_damaged_file() -> None:
    _, state = made("8", False)
    from qtorch.dtypes.copying import rebuild

    function, arguments = state.__reduce_ex__(2)
    assert function is rebuild
    name, tensors, *rest = arguments
    refuses("damaged", lambda: rebuild(name, {**tensors, "scale": tensors["scale"][:-1].clone()}, *rest))
