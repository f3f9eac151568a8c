"""Quantization-aware training of convolutions: converting changes nothing, for every recipe and every shape."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from qtorch import MappingType, PerAxis, PerTensor, compute_error, int8_dynamic_activation_int8_weight, quantize_
from qtorch.dtypes import ConvWeight
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.recipes.base import Recipe
from qtorch.training import calibrate, convert, lsq, qat, scheduled_qat
from tests.every_recipe import OF_QAT, make
from tests.test_convolutions import CONVS, ConvNet, X

pytestmark = pytest.mark.filterwarnings("ignore:qtorch. linear")  # of emulations


def prepared(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = ConvNet()
    try:
        recipe = qat(make(name, 32))
    except ValueError as error:
        pytest.skip(str(error))
    quantize_(model, {CONVS: recipe})
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    before = model.convs[0].weight.dequantize().detach().clone()
    model(X).square().sum().backward()
    assert all(conv.weight.grad.shape == conv.weight.shape for conv in model.convs)
    optimizer.step()
    assert not torch.equal(before, model.convs[0].weight.dequantize())
    return model


@pytest.mark.parametrize("name", OF_QAT)
def test_converted(name: str) -> None:
    model = prepared(name)
    floats = [conv.weight.dequantize().detach() for conv in model.convs]
    with torch.no_grad():
        y = model(X)
    assert torch.equal(model(X).detach(), y)
    quantize_(model, convert())
    with torch.no_grad(), record_kernels() as ran:
        served = model(X)
    assert all(type(conv.weight) is ConvWeight for conv in model.convs)
    if any("int8" in kernel for kernel in ran if kernel.startswith("linear:")):
        assert torch.equal(served, y)
    else:
        assert compute_error(y, served) > 70
    for conv, values in zip(model.convs, floats):
        alone = nn.Conv2d(*values.shape[1::-1], values.shape[2:])
        alone.weight = nn.Parameter(values)
        quantize_(alone, {"weight": make(name, 32)})
        assert torch.equal(conv.weight.plain()[0], alone.weight.plain()[0])


@pytest.mark.parametrize("mapping", list(MappingType))
@pytest.mark.parametrize("groups", [1, 4, 64])
def test_a_scale_for_each_image(mapping: MappingType, groups: int) -> None:
    """Trained with one scale per image, served with the same bits by the kernel for whole convolutions."""
    if mapping is MappingType.SYMMETRIC_NO_CLIPPING_ERR:
        pytest.skip("not of this recipe")
    torch.manual_seed(0)
    recipe = int8_dynamic_activation_int8_weight(mapping, act_granularity=PerAxis(0))
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, stride=2, groups=groups))
    x = X.clone().requires_grad_()
    quantize_(model, {"0": qat(recipe)})
    y = model(x)
    y.square().sum().backward()
    assert model[0].weight.grad.abs().sum() > 0
    assert x.grad.abs().sum() > 0
    broken = X.clone()
    broken[1, 3, 2, 2] = float("nan")
    trained_broken = model(broken).detach()
    quantize_(model, convert())
    with torch.no_grad(), record_kernels() as ran:
        served = model(X)
    assert ran[0] in ("conv:cpu_conv", "conv:image_conv")
    assert torch.equal(served, y.detach())
    assert torch.equal(served.isnan(), y.isnan())
    with torch.no_grad():
        served_broken = model(broken)
    assert torch.equal(served_broken.isnan(), trained_broken.isnan())
    assert served_broken[1].isnan().all()
    assert not served_broken[0].isnan().any()
    with compiled_library.use(None), torch.no_grad():
        assert torch.equal(model(X), served)


# --- learned and observed scales, in every shape ---

LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
OPTIONS = [
    {},
    {"stride": 2, "padding": 1, "bias": False},
    {"padding": "same", "padding_mode": "circular"},
    {"groups": 4, "padding": 2, "dilation": 2},
]
LEARNED: dict[str, Recipe] = {
    "4 bits": lsq(),
    "2 bits, one step": lsq(weight_bits=2, activation_bits=2, granularity=PerTensor()),
    "offset": lsq(activation_offset=True),
    "dynamic activations": lsq(recipe=int8_dynamic_activation_int8_weight()),
    "groups": lsq(recipe=qtorch.int8_dynamic_activation_int4_weight(group_size=8)),
    "weight only": lsq(recipe=qtorch.int4_weight_only(group_size=8)),
    "without state": qat(int8_dynamic_activation_int8_weight()),
    "scheduled": scheduled_qat(qtorch.int8_static_activation_int8_weight(0.03), observer="moving_average"),
}


def layer_and_input(ndim: int, options: dict) -> tuple[nn.Module, Tensor]:
    layer = LAYERS[ndim](16, 8, 2, **options)
    return nn.Sequential(layer, nn.Flatten()), torch.randn(3, 16, *(6, 5, 4)[:ndim])


def train(model: nn.Module, x: Tensor, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ndim", LAYERS)
@pytest.mark.parametrize("name", LEARNED)
def test_every_shape(name: str, ndim: int, options: dict) -> None:
    model, x = layer_and_input(ndim, options)
    x = x if "groups" in options else x.abs()
    quantize_(model, {"0": LEARNED[name]})
    train(model, x)
    model.eval()
    y = model(x).detach()
    with torch.no_grad():
        assert torch.equal(model(x), y)
    quantize_(model, convert())
    assert type(model[0]) is LAYERS[ndim]
    assert type(model[0].weight) is ConvWeight
    with record_kernels() as ran:
        served = model(x)
    if name == "weight only":
        assert compute_error(y, served) > 100
    else:
        assert torch.equal(served, y)
        assert all("int8" in kernel for kernel in ran if kernel.startswith("linear:"))
        assert ran[0] == "conv:cpu_conv" or "linear:" in ran[0]
    assert set(model.state_dict()) <= {"0.weight", "0.bias"}


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
        quantize_(nn.Sequential(nn.Conv2d(4, 4, 3)), {"0": lsq(recipe=qtorch.int4_weight_only(group_size=32))})
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    quantize_(model, {"0": lsq()})
    with pytest.raises(ValueError, match="0: no input has been seen"):
        quantize_(model, convert())
