"""FP4 training: gradients without a bias, the Hadamard transform, weights that serve in the formats of inference."""

import copy

import pytest
import torch
from torch import nn

from qtorch import PerBlock, PerGroup, compute_error, quantize_, training
from qtorch.primitives import mx_spec, nvfp4_spec
from qtorch.training import GemmSpec, TrainingSpec, integer
from qtorch.training.engine.contraction import contraction, transformed
from tests.refusals import refuses

RECIPES = {"nvfp4": training.nvfp4_training, "mxfp4": training.mxfp4_training}
every_format = pytest.mark.parametrize("name", RECIPES)


@every_format
def test_gradients_have_no_bias(name: str) -> None:
    """The mean of many is that of the weight as the forward has it; one has the error of the format."""
    torch.manual_seed(0)
    spec = RECIPES[name]().training_spec()
    x, w, g = torch.randn(64, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True), torch.randn(64, 32)
    wanted = g @ spec.output.rhs.fake_quantize(w.detach())
    draws = [torch.autograd.grad(contraction(x, w, spec), (x, w), g) for _ in range(100)]
    (one, of_w), mean, mean_w = draws[0], *(torch.stack(each).mean(0) for each in zip(*draws))
    assert 12 < compute_error(wanted, one) < 20
    assert 18 < compute_error(wanted, mean) - compute_error(wanted, one) < 22  # 100 independent errors: 20 dB
    # Of x, which is rounded to nearest, the transform makes most of the error random.
    assert compute_error(g.t() @ x.detach(), mean_w) - compute_error(g.t() @ x.detach(), of_w) > 15


@every_format
def test_nothing_of_a_gradient_clips(name: str) -> None:
    spec = RECIPES[name]().training_spec().grad_input.lhs
    x = torch.randn(256, 64) * torch.rand(256, 1).exp2()
    scale, _ = spec.choose_qparams(x)
    size = spec.granularity.group_size
    assert ((x.abs() / scale.float().repeat_interleave(size, 1)).amax() <= 6).item()
    nearest = RECIPES[name](stochastic_rounding=False).training_spec().grad_input.lhs
    clipped = x.abs() / nearest.choose_qparams(x)[0].float().repeat_interleave(size, 1)
    assert clipped.amax() > 6


@pytest.mark.parametrize("size", [2, 16, 32])
def test_the_transform_cancels(size: int) -> None:
    x, y = torch.randn(8, 50), torch.randn(5, 50)
    a, b = transformed(x, y, size)
    assert a.shape[1] == -(-50 // size) * size
    assert not torch.equal(a[:, :50], x)
    torch.testing.assert_close(a @ b.t(), x @ y.t(), rtol=1e-4, atol=1e-4)
    fine = GemmSpec(integer(20), integer(20), hadamard=size)
    w, x = torch.randn(5, 50, requires_grad=True), x.requires_grad_()
    contraction(x, w, TrainingSpec(fine, fine, fine)).sum().backward()
    assert compute_error(torch.ones(8, 5) @ w.detach(), x.grad) > 80
    assert compute_error(torch.ones(5, 8) @ x.detach(), w.grad) > 80


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_experts_serve_what_was_trained(name: str) -> None:
    torch.manual_seed(0)
    weight = training.MasterWeight.of(torch.randn(3, 32, 64), RECIPES[name]().training_spec())
    served, spec = weight.convert(), weight.training_spec.output.rhs
    for expert, floats in zip(served.dequantize(), weight.floats(), strict=True):
        assert torch.equal(expert, spec.fake_quantize(floats))


@every_format
def test_a_square_block_has_one_scale_in_rows(name: str) -> None:
    layer = nn.Sequential(nn.Linear(64, 32))
    quantize_(layer, RECIPES[name]())
    trained = copy.deepcopy(layer)
    quantize_(layer, training.convert())
    size = {"nvfp4": 16, "mxfp4": 32}[name]
    weight = layer[0].weight
    spec = {"nvfp4": nvfp4_spec(), "mxfp4": mx_spec("float4_e2m1")}[name]
    assert weight.scheme.weight == weight.scheme.activation == spec
    assert spec.granularity == PerGroup(size)
    scale = weight.scales()[0].float().unflatten(0, (-1, size))
    assert torch.equal(scale, scale[:, :1].expand_as(scale))
    square = spec.with_granularity(PerBlock((size, size)))
    assert torch.equal(weight.dequantize(), square.fake_quantize(trained[0].weight.floats()))


def test_what_does_not_fit() -> None:
    for size in (3, 1, 0):
        with pytest.raises(ValueError, match="hadamard is a power of two"):
            GemmSpec(hadamard=size)
    refuses("leave out fold, mid_alpha and hadamard", lambda: GemmSpec(reuse_forward=True, hadamard=16))
    with pytest.raises(ValueError, match=r"block_size \(16, 16\) does not divide"):
        quantize_(nn.Sequential(nn.Linear(64, 40)), training.nvfp4_training())
    rotated = training.mixed_precision_training(TrainingSpec(GemmSpec(nvfp4_spec(), nvfp4_spec(), hadamard=16)))
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, rotated)
    refuses(r"varies by call \(GemmSpec.fold, mid_alpha, hadamard\)", lambda: quantize_(model, training.convert()))


def test_the_first_and_the_last_layer_by_a_mapping() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    report = quantize_(model, {r"0|2": None, r".*": training.nvfp4_training()})
    assert [layer.name for layer in report.quantized] == ["1.weight"]
    assert isinstance(model[1].weight, training.MasterWeight)
