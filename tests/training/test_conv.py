"""quantized_conv1d, 2d, 3d against torch's: exactly in full precision, within bounds in int8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qtorch import compute_error
from qtorch.kernels import record_kernels
from qtorch.training import (
    MasterWeight,
    TrainingSpec,
    fully_quantized,
    quantized_conv1d,
    quantized_conv2d,
    quantized_conv3d,
)

CONVS = {
    1: (quantized_conv1d, functional.conv1d),
    2: (quantized_conv2d, functional.conv2d),
    3: (quantized_conv3d, functional.conv3d),
}
OPTIONS = [
    {},
    {"stride": 2},
    {"padding": 1},
    {"padding": "same"},
    {"padding": "valid", "dilation": 2},
    {"padding": "same", "dilation": 2},
    {"groups": 2},
    {"groups": 4, "stride": 2, "padding": 2, "dilation": 2},
]


def results(function: object, x: Tensor, w: Tensor, b: Tensor, **options: object) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = function(leaves[0], leaves[1], bias=leaves[2], **options)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    return [y.detach(), *(t.grad for t in leaves)]


def operands(ndim: int, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 8, *(9, 7, 6)[:ndim]), torch.randn(12, 8 // groups, *(3, 3, 2)[:ndim]), torch.randn(12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ndim", CONVS)
def test_in_full_precision(ndim: int, options: dict) -> None:
    mine, theirs = CONVS[ndim]
    x, w, b = operands(ndim, options.get("groups", 1))
    got = results(lambda x, w, **o: mine(x, w, TrainingSpec(), **o), x, w, b, **options)
    for a, wanted in zip(got, results(theirs, x, w, b, **options)):
        torch.testing.assert_close(a, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ndim", CONVS)
def test_in_int8(ndim: int) -> None:
    mine, theirs = CONVS[ndim]
    x, w, b = operands(ndim)
    with record_kernels() as ran:
        got = results(lambda x, w, **o: mine(x, w, fully_quantized(), **o), x, w, b, padding=1)
    assert ran.count("int_matmul") == 3
    for a, wanted in zip(got[:3], results(theirs, x, w, b, padding=1)):
        assert 25 < compute_error(wanted, a) < 60


def test_a_scale_for_each_output_channel_and_window() -> None:
    """A channel, or an image, a thousand times as large leaves the accuracy of the others as it is."""
    x, w, _ = operands(2)
    w[3] *= 1000
    x[1] *= 1000
    y, wanted = quantized_conv2d(x, w, fully_quantized()), functional.conv2d(x, w)
    assert compute_error(wanted[0, 4], y[0, 4]) > 30


def test_without_a_batch() -> None:
    x, w, _ = operands(2)
    assert torch.equal(quantized_conv2d(x[0], w, fully_quantized()), quantized_conv2d(x[:1], w, fully_quantized())[0])


def test_a_weight_in_training() -> None:
    x, w, b = operands(2)
    weight = torch.nn.Parameter(MasterWeight.of(w, fully_quantized()))
    y = functional.conv2d(x, weight, b, padding=1)
    assert torch.equal(y, quantized_conv2d(x, w, fully_quantized(), b, padding=1))
    y.sum().backward()
    assert weight.grad.shape == w.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "8 input channels do not fit a weight of shape"),
        ({"stride": 2, "padding": "same"}, "padding='same' takes a stride of 1"),
        ({"padding": "reflect"}, "padding is 'same', 'valid' or sizes, got 'reflect'"),
        ({"stride": (1, 2, 3)}, "take 1 or 2 sizes"),
        ({"dilation": 9}, "exceeds the padded input"),
    ],
)
def test_errors(options: dict, message: str) -> None:
    x, w, _ = operands(2)
    with pytest.raises(ValueError, match=message):
        quantized_conv2d(x, w, fully_quantized(), **options)
    with pytest.raises(ValueError, match="takes an input of 2 or 3 axes"):
        quantized_conv1d(x, w, fully_quantized())
