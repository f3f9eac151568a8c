"""Training of convolutions: converting changes nothing, for every recipe and shape; batch norms folded into them."""

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import qtorch
from qtorch import compute_error, int8_dynamic_activation_int8_weight, int8_static_activation_int8_weight, quantize_
from qtorch.primitives import MappingType, PerAxis, PerTensor
from qtorch.training import calibrate, convert, fold_batch_norm, lsq, qat, scheduled_qat
from tests.every_recipe import OF_QAT, make
from tests.test_convolutions import CONVS, ConvNet, X

pytestmark = pytest.mark.filterwarnings("ignore:qtorch. linear")


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
    with torch.no_grad(), qtorch.kernels.record_kernels() as ran:
        served = model(X)
    assert all(type(conv.weight) is qtorch.dtypes.ConvWeight for conv in model.convs)
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
    signal, model = torch.randn(2, 64, 20), nn.Sequential(nn.Conv1d(64, 64, 3, groups=groups))
    floats = model(signal)
    quantize_(model, {"0": qat(recipe)})
    assert compute_error(floats, model(signal)) > 30  # of windows that overlap in memory
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
    with torch.no_grad(), qtorch.kernels.record_kernels() as ran:
        served = model(X)
    assert ran[0] in ("conv:cpu_conv", "conv:image_conv")
    assert torch.equal(served, y.detach())
    assert torch.equal(served.isnan(), y.isnan())
    with torch.no_grad():
        served_broken = model(broken)
    assert torch.equal(served_broken.isnan(), trained_broken.isnan())
    assert served_broken[1].isnan().all()
    assert not served_broken[0].isnan().any()
    with qtorch.kernels.cpu.compiled_library.use(None), torch.no_grad():
        assert torch.equal(model(X), served)


# --- learned and observed scales, in every shape ---
LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
OPTIONS = [
    {}, {"stride": 2, "padding": 1, "bias": False}, {"padding": "same", "padding_mode": "circular"},
    {"groups": 4, "padding": 2, "dilation": 2},
]  # fmt: skip
LEARNED: dict[str, qtorch.recipes.base.Recipe] = {
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
    return nn.Sequential(LAYERS[ndim](16, 8, 2, **options), nn.Flatten()), torch.randn(3, 16, *(6, 5, 4)[:ndim])


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
    assert type(model[0].weight) is qtorch.dtypes.ConvWeight
    with qtorch.kernels.record_kernels() as ran:
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
        padded, padding = nn.functional.pad(x, ends, mode=layer.padding_mode), 0
    x_hat = layer.quantize_input(padded.flatten(1)).values.reshape(padded.shape)
    w_hat = layer.from_matrix(layer, layer.quantize_weight(layer.matrix).values, layer.weight.shape)
    z = nn.functional.conv2d(x_hat, w_hat, layer.bias, layer.stride, padding, layer.dilation, layer.groups)
    assert compute_error(z, y) > 100
    for name, a, b in zip(["input", *names], got, torch.autograd.grad(z, [x, *leaves], grad)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)
        assert bool(a.any()), name


def test_autocast_and_errors() -> None:
    model, x = layer_and_input(2, {})
    quantize_(model, {"0": lsq()})
    calibrate(model, [x])
    assert torch.equal(model[0](x[0]), model[0](x)[0])
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    assert 30 < compute_error(model(x), y) < 70

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


BATCH_NORM_CONVS = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d), 3: (nn.Conv3d, nn.BatchNorm3d)}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x))


def model_and_input(ndim: int = 2, bias: bool = True) -> tuple[nn.Sequential, Tensor]:
    """With statistics of data, gammas of either sign and one of zero."""
    conv, norm = BATCH_NORM_CONVS[ndim]
    model = nn.Sequential(conv(4, 8, 3, bias=bias), norm(8), nn.ReLU(), conv(8, 6, 2), norm(6, affine=False))
    x = torch.randn(5, 4, *(7, 6, 5)[:ndim]) * 3 + 1
    nn.init.uniform_(model[1].weight, -2, 2)
    nn.init.normal_(model[1].bias)
    with torch.no_grad():
        model[1].weight[3] = 0
        for _ in range(30):
            model(x)
    return model, x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ndim", BATCH_NORM_CONVS)
def test_folded_for_serving(ndim: int, bias: bool) -> None:
    model, x = model_and_input(ndim, bias)
    wanted = model.eval()(x)
    assert fold_batch_norm(model) == [("0", "1"), ("3", "4")]
    assert [type(module) for module in model[1::3]] == [nn.Identity, nn.Identity]
    assert compute_error(wanted, model(x)) > 100


def test_by_name_and_kept() -> None:
    model = nn.Sequential(Branch(), nn.ReLU()).eval()
    assert fold_batch_norm(model) == []
    x = torch.randn(2, 8, 5, 5)
    wanted = model(x)
    fold_batch_norm(model, {"0.conv": "0.norm"})
    assert type(model[0].norm) is nn.Identity
    assert compute_error(wanted, model(x)) > 100
    model, x = model_and_input()
    kept = copy.deepcopy(model)
    fold_batch_norm(kept, train=True)
    for mode in (True, False):
        a, b = model.train(mode)(x), kept.train(mode)(x)
        assert torch.equal(a, b)
    names = {name for name, _ in kept.named_parameters()}
    assert names == {"0.weight", "0.bias", "0.norm.weight", "0.norm.bias", "3.weight", "3.bias"}
    # At 8 bits the fake-quantized pair is close to the float pair, whose statistics are those of the batch.
    model, x = model_and_input()
    quantized = copy.deepcopy(model)
    fold_batch_norm(quantized, train=True)
    quantize_(quantized, {"0|3": lsq(8, 8)})
    model.train(), quantized.train()
    assert 25 < compute_error(model(2 * x), quantized(2 * x)) < 60


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ndim", BATCH_NORM_CONVS)
@pytest.mark.parametrize("name", ["lsq", "scheduled"])
def test_trained_and_converted_bit_for_bit(name: str, ndim: int, bias: bool) -> None:
    model, x = model_and_input(ndim, bias)
    wanted = copy.deepcopy(model).eval()(x)
    fold_batch_norm(model, train=True)
    static = int8_static_activation_int8_weight(0.05)
    recipe = lsq(8, 8) if name == "lsq" else scheduled_qat(static, observer="min_max")
    quantize_(model, {"0|3": recipe})
    before = model[0].norm.running_mean.clone()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    assert not torch.equal(model[0].norm.running_mean, before)
    assert all(bool(p.grad.any()) for p in model[0].norm.parameters())
    y = model.eval()(x).detach()
    assert 20 < compute_error(wanted, y) < 60
    quantize_(model, convert())
    assert type(model[0]) is BATCH_NORM_CONVS[ndim][0]
    assert set(model.state_dict()) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert type(model[0].weight) is qtorch.dtypes.ConvWeight
    with qtorch.kernels.record_kernels() as ran:
        assert torch.equal(model(x), y)
    if ndim < 3 and qtorch.kernels.cpu.compiled_library.library() is not None:
        assert ran[0] == "conv:cpu_conv"
    else:
        assert ran[0].startswith("linear:")
        assert "int8" in ran[0]


def test_errors_leave_the_model_alone() -> None:
    texts = []
    for pairs in ({"0": "2"}, {"2": "1"}, {"0": "4"}, {"0": "1", "3": "1"}, {"nothing": "1"}):
        model, _ = model_and_input()
        with pytest.raises(ValueError, match=r"^fold_batch_norm: ") as error:
            fold_batch_norm(model, pairs)
        texts.append(str(error.value))
        assert type(model[1]) is nn.BatchNorm2d
    with pytest.raises(ValueError, match="has no running statistics"):
        fold_batch_norm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)))
    assert_expected_inline(
        "\n".join(texts),
        """\
fold_batch_norm: 2 is not an nn.BatchNorm1d, 2d or 3d but a ReLU
fold_batch_norm: 2 is not an nn.Conv1d, 2d or 3d but a ReLU
fold_batch_norm: 0 has 8 channels, 4 has 6
fold_batch_norm: 3 has 6 channels, 1 has 8
fold_batch_norm: nothing is not an nn.Conv1d, 2d or 3d but a NoneType""",
    )
