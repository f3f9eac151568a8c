"""UintxTensor: packed numbers that come back as they were, through all that a tensor goes through."""

import inspect

import pytest
import torch
from torch import Tensor

from qtorch.dtypes import UintxTensor, to_uintx


def numbers(bits: int, *shape: int) -> Tensor:
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
def test_takes_its_bits(bits: int) -> None:
    packed = to_uintx(numbers(bits, 64, 32), f"uint{bits}")
    assert packed.qdata.nbytes * 8 == bits * 64 * 32
    assert packed.nbytes == packed.qdata.nbytes + 4


def test_argument_order_is_torchao_s() -> None:
    assert list(inspect.signature(to_uintx).parameters) == ["uint8_data", "dtype", "pack_dim"]
    assert list(inspect.signature(UintxTensor.from_uint8).parameters) == ["int_data", "dtype", "pack_dim"]


def test_what_it_refuses() -> None:
    data = numbers(3, 4, 8)
    for dtype in (torch.uint8, torch.int4, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="to_uintx takes uint1 to uint7, got"):
            to_uintx(data, dtype)
    with pytest.raises(TypeError, match=r"to_uintx takes uint8 data, got torch\.int64"):
        to_uintx(data.long(), torch.uint3)
    with pytest.raises(ValueError, match="uint3 holds 0 to 7, the data has 9"):
        to_uintx(torch.full((4, 8), 9, dtype=torch.uint8), torch.uint3)
    for dim in (2, -3):
        with pytest.raises(ValueError, match=rf"data of shape \(4, 8\) has no dimension {dim}"):
            to_uintx(data, torch.uint3, dim)
    with pytest.raises(TypeError, match=r"UintxTensor takes a floating-point dtype .*, got torch\.int32"):
        to_uintx(data, torch.uint3).to(torch.int32)
