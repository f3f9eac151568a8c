"""Tensors in codes that are no weights: states of optimizers in blocks, and packed numbers."""

import inspect

import pytest
import torch

from qtorch.dtypes import UintxTensor, blocked_tensor, to_uintx
from qtorch.kernels.ops.adam import FORMS
from qtorch.primitives import LinearSpec
from tests.refusals import refuses

SHAPES = [((7, 100), 64, False), ((5000,), 256, True), ((3, 5, 9), 32, True), ((4, 3, 5, 7), 53, False), ((), 8, True)]
ERRORS = {"8": (1e-4, 0.03), "4": (1e-2, 0.35), "float8": (1e-3, 0.08)}
"""Least and most relative error of random numbers."""


def scheme(form: str, root: bool, shape: tuple[int, ...], block: int, flat: bool) -> blocked_tensor.BlockedScheme:
    spec = FORMS[form].second if root else FORMS[form].first
    return blocked_tensor.BlockedScheme(LinearSpec(spec), shape, torch.float32, block, flat, root)


def made(form: str, root: bool, shape: tuple[int, ...] = (6, 80), block: int = 40, flat: bool = False):
    x = torch.randn(shape)
    x = x.square() if root else x
    return x, blocked_tensor.BlockedTensor.quantized(x, scheme(form, root, shape, block, flat))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("shape, block, flat", SHAPES)
def test_values(form: str, root: bool, shape: tuple[int, ...], block: int, flat: bool) -> None:
    x, state = made(form, root, shape, block, flat)
    assert (state.shape, state.dtype) == (shape, torch.float32)
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
def test_writes_and_roots(form: str) -> None:
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
    x = torch.tensor([[1.0, 1e-20, 0.0, 1e-12]])
    state = blocked_tensor.BlockedTensor.quantized(x, scheme(form, True, (1, 4), 4, False))
    assert (state.dequantize() > 0).tolist() == (x > 0).tolist()


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


def test_what_it_refuses() -> None:
    _, state = made("8", False, (5000,), 256, True)
    refuses(r"cuts blocks of 256.*optim_bits=32", lambda: state[100:200])
    _, state = made("8", False)
    refuses("along axis 1", lambda: state[:, :40])
    refuses("state of an optimizer", lambda: state.t(), NotImplementedError)
    refuses("no view of shape", lambda: state.view(80, 6))
    refuses("takes floats of it", lambda: blocked_tensor.BlockedTensor.quantized(torch.zeros(3), state.scheme))
    _, state = made("8", False)
    from qtorch.dtypes.copying import rebuild

    function, arguments = state.__reduce_ex__(2)
    assert function is rebuild
    name, tensors, *rest = arguments
    refuses("damaged", lambda: rebuild(name, {**tensors, "scale": tensors["scale"][:-1].clone()}, *rest))
    data = numbers(3, 4, 8)
    for dtype in (torch.uint8, torch.int4, torch.float8_e4m3fn):
        refuses("to_uintx takes uint1 to uint7, got", lambda dtype=dtype: to_uintx(data, dtype))
    refuses(r"to_uintx takes uint8 data, got torch\.int64", lambda: to_uintx(data.long(), torch.uint3), TypeError)
    with pytest.raises(ValueError, match="uint3 holds 0 to 7, the data has 9"):
        to_uintx(torch.full((4, 8), 9, dtype=torch.uint8), torch.uint3)
    for dim in (2, -3):
        with pytest.raises(ValueError, match=rf"data of shape \(4, 8\) has no dimension {dim}"):
            to_uintx(data, torch.uint3, dim)
    with pytest.raises(TypeError, match=r"UintxTensor takes a floating-point dtype .*, got torch\.int32"):
        to_uintx(data, torch.uint3).to(torch.int32)


def numbers(bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(2**bits, shape, dtype=torch.uint8)


@pytest.mark.parametrize(("shape", "axis"), [((37,), 0), ((5, 24), -1), ((5, 24), 0), ((3, 5, 16), 1), ((0, 8), -1)])
@pytest.mark.parametrize("bits", range(1, 8))
def test_gives_the_numbers_back(bits: int, shape: tuple[int, ...], axis: int) -> None:
    data = numbers(bits, *shape)
    packed = to_uintx(data, getattr(torch, f"uint{bits}"), axis)
    for plain in (packed.get_plain(), packed.dequantize()):
        assert plain.dtype == torch.uint8
        assert torch.equal(plain, data)
    assert (packed.shape, packed.dtype) == (data.shape, torch.uint8)


@pytest.mark.parametrize("bits", range(1, 8))
def test_takes_its_bits_and_arguments_of_torchao(bits: int) -> None:
    packed = to_uintx(numbers(bits, 64, 32), f"uint{bits}")
    assert packed.qdata.nbytes * 8 == bits * 64 * 32
    assert packed.nbytes == packed.qdata.nbytes + 4
    assert list(inspect.signature(to_uintx).parameters) == ["uint8_data", "dtype", "pack_dim"]
    assert list(inspect.signature(UintxTensor.from_uint8).parameters) == ["int_data", "dtype", "pack_dim"]
