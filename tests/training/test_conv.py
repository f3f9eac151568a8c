"""Quantized convolutions, plain and transposed, against those of torch: exact in full precision, bounded in int8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qtorch import compute_error, training
from qtorch.kernels import record_kernels
from qtorch.training import MasterWeight, TrainingSpec, fully_quantized, quantized_conv1d, quantized_conv2d

CONVS = {
    f"conv{of}{ndim}d": (getattr(training, f"quantized_conv{of}{ndim}d"), getattr(functional, f"conv{of}{ndim}d"))
    for of in ("", "_transpose")
    for ndim in (1, 2, 3)
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
OF_TRANSPOSED = [
    {},
    {"stride": 2},
    {"stride": 3, "padding": 1, "output_padding": 2},
    {"padding": 2, "dilation": 2},
    {"groups": 2, "stride": 2, "output_padding": 1},
]
CASES = [(name, options) for name in CONVS for options in (OF_TRANSPOSED if "transpose" in name else OPTIONS)]


def results(function: object, x: Tensor, w: Tensor, b: Tensor, **options: object) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = function(leaves[0], leaves[1], bias=leaves[2], **options)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    return [y.detach(), *(t.grad for t in leaves)]


def operands(name: str, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    ndim = int(name[-2])
    channels = (8, 12 // groups) if "transpose" in name else (12, 8 // groups)
    return torch.randn(2, 8, *(9, 7, 6)[:ndim]), torch.randn(*channels, *(3, 3, 2)[:ndim]), torch.randn(12)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_in_full_precision(name: str, options: dict) -> None:
    mine, theirs = CONVS[name]
    x, w, b = operands(name, options.get("groups", 1))
    got = results(lambda x, w, **o: mine(x, w, TrainingSpec(), **o), x, w, b, **options)
    for a, wanted in zip(got, results(theirs, x, w, b, **options)):
        torch.testing.assert_close(a, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "options"), [*((name, {"padding": 1}) for name in CONVS), *CASES[-5:]], ids=str)
def test_in_int8(name: str, options: dict) -> None:
    mine, theirs = CONVS[name]
    x, w, b = operands(name, options.get("groups", 1))
    with record_kernels() as ran:
        got = results(lambda x, w, **o: mine(x, w, fully_quantized(), **o), x, w, b, **options)
    assert ran.count("int_matmul") == 3 * options.get("groups", 1)
    for a, wanted in zip(got[:3], results(theirs, x, w, b, **options)):
        assert 25 < compute_error(wanted, a) < 60


def test_a_scale_for_each_output_channel_and_window() -> None:
    """A channel, or an image, a thousand times as large leaves the accuracy of the others as it is."""
    x, w, _ = operands("conv2d")
    w[3] *= 1000
    x[1] *= 1000
    y, wanted = quantized_conv2d(x, w, fully_quantized()), functional.conv2d(x, w)
    assert compute_error(wanted[0, 4], y[0, 4]) > 30


def test_without_a_batch() -> None:
    for name in ("conv2d", "conv_transpose2d"):
        x, w, _ = operands(name)
        conv = CONVS[name][0]
        assert torch.equal(conv(x[0], w, fully_quantized()), conv(x[:1], w, fully_quantized())[0])


def test_a_weight_in_training() -> None:
    x, w, b = operands("conv2d")
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
    x, w, _ = operands("conv2d")
    with pytest.raises(ValueError, match=message):
        quantized_conv2d(x, w, fully_quantized(), **options)
    with pytest.raises(ValueError, match="takes an input of 2 or 3 axes"):
        quantized_conv1d(x, w, fully_quantized())
