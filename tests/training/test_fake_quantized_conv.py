"""Convolutions with learned and dynamic scales: in training what they are when converted."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qtorch import (
    compute_error,
    int4_weight_only,
    int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_weight,
    quantize_,
)
from qtorch.dtypes import ConvWeight
from qtorch.kernels import record_kernels
from qtorch.primitives import PerTensor
from qtorch.training import calibrate, convert, lsq

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
OPTIONS = [
    {},
    {"stride": 2, "padding": 1, "bias": False},
    {"padding": "same", "padding_mode": "circular"},
    {"groups": 4, "padding": 2, "dilation": 2},
]
RECIPES = {
    "4 bits": lsq(),
    "2 bits, one step": lsq(weight_bits=2, activation_bits=2, granularity=PerTensor()),
    "offset": lsq(activation_offset=True),
    "dynamic activations": lsq(recipe=int8_dynamic_activation_int8_weight()),
    "groups": lsq(recipe=int8_dynamic_activation_int4_weight(group_size=8)),
}


def layer_and_input(ndim: int, options: dict) -> tuple[nn.Module, Tensor]:
    layer = CONVS[ndim](16, 8, 2, **options)
    return nn.Sequential(layer, nn.Flatten()), torch.randn(3, 16, *(6, 5, 4)[:ndim])


def train(model: nn.Module, x: Tensor, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ndim", CONVS)
@pytest.mark.parametrize("name", RECIPES)
def test_converted_bit_for_bit(name: str, ndim: int, options: dict) -> None:
    model, x = layer_and_input(ndim, options)
    x = x if "groups" in options else x.abs()
    quantize_(model, {"0": RECIPES[name]})
    train(model, x)
    model.eval()
    y = model(x).detach()
    with torch.no_grad():
        assert torch.equal(model(x), y)
    quantize_(model, convert())
    assert type(model[0]) is CONVS[ndim]
    assert type(model[0].weight) is ConvWeight
    with record_kernels() as ran:
        assert torch.equal(model(x), y)
    assert all("int8" in kernel for kernel in ran if kernel.startswith("linear:"))
    assert "linear:" in ran[0]
    assert set(model.state_dict()) <= {"0.weight", "0.bias"}


def test_weight_only() -> None:
    model, x = layer_and_input(2, {})
    quantize_(model, {"0": lsq(recipe=int4_weight_only(group_size=16))})
    train(model, x)
    y = model.eval()(x).detach()
    quantize_(model, convert())
    assert compute_error(y, model(x)) > 100


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_those_of_fake_quantization(options: dict) -> None:
    model, x = layer_and_input(2, options)
    quantize_(model, {"0": lsq(weight_bits=8, activation_bits=8)})
    calibrate(model, [x])
    layer = model[0]
    x.requires_grad_()
    y = layer(x)
    grad = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    names, leaves = zip(*layer.named_parameters())
    got = torch.autograd.grad(y, [x, *leaves], grad)
    # torch's convolution of the operands, which the quantizers fake-quantize.
    padded, padding = x, layer.padding
    if layer.padding_mode != "zeros":
        ends = layer._reversed_padding_repeated_twice
        padded, padding = functional.pad(x, ends, mode=layer.padding_mode), 0
    x_hat = layer.quantize_input(padded.flatten(1)).values.reshape(padded.shape)
    w_hat = layer.from_matrix(layer, layer.quantize_weight(layer.matrix).values, layer.weight.shape)
    z = functional.conv2d(x_hat, w_hat, layer.bias, layer.stride, padding, layer.dilation, layer.groups)
    assert compute_error(z, y) > 100
    for name, a, b in zip(["input", *names], got, torch.autograd.grad(z, [x, *leaves], grad)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)
        assert bool(a.any()), name


@pytest.mark.parametrize("name", ["4 bits", "dynamic activations"])
def test_one_graph(name: str) -> None:
    model, x = layer_and_input(2, {"padding": 1})
    quantize_(model, {"0": RECIPES[name]})
    train(model, x, 1)
    results = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        y = run(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_without_a_batch_and_under_autocast() -> None:
    model, x = layer_and_input(2, {})
    quantize_(model, {"0": lsq()})
    calibrate(model, [x])
    assert torch.equal(model[0](x[0]), model[0](x)[0])
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    assert 30 < compute_error(model(x), y) < 70


def test_errors_name_the_layer() -> None:
    class Rescaled(nn.Conv2d):
        pass

    with pytest.raises(ValueError, match=r"0: takes the weights of .*nn.Conv2d.*exactly these"):
        quantize_(nn.Sequential(Rescaled(4, 4, 3)), {"0": lsq()})
    with pytest.raises(ValueError, match=r"0: .* seen as the matrix \(4, 36\)"):
        quantize_(nn.Sequential(nn.Conv2d(4, 4, 3)), {"0": lsq(recipe=int4_weight_only(group_size=32))})
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    quantize_(model, {"0": lsq()})
    with pytest.raises(ValueError, match="0: no input has been seen"):
        quantize_(model, convert())
