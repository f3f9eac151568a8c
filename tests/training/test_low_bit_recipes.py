"""Training in few bits: binary, int4, FP4, and adapters."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import PerBlock, PerGroup, compute_error, quantize_, training
from qtorch.primitives import mx_spec, nvfp4_spec
from qtorch.training import GemmSpec, TrainingSpec, binary_training, convert, int4_training, integer, lora_qat, qat
from qtorch.training.engine.contraction import contraction, transformed, unbiased
from qtorch.training.engine.operand import quantize_operand
from qtorch.training.quantization_aware.recipes.lora_qat import LoRALinear
from tests.refusals import refuses
from tests.training.small_model import fit, mlp


def layer_in(recipe: object, inputs: int = 32, outputs: int = 16) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    quantize_(nn.Sequential(layer), recipe)
    return layer


def serves_what_it_trained(layer: nn.Linear, x: Tensor, bits: int) -> None:
    with torch.no_grad():
        trained = layer(x)
        quantize_(layer, convert())
        assert torch.equal(layer(x), trained)
    assert layer.weight.inner_tensors["qdata"].nbytes == bits * layer.weight.numel() // 8  # type: ignore[operator]


def test_binary() -> None:
    """The equations at the top of its file."""
    layer, x = layer_in(binary_training(1.5, edge_bits=None)), torch.randn(20, 32, requires_grad=True)
    w = layer.weight.master.detach().clone()
    y = layer(x)
    g = torch.randn_like(y)
    y.backward(g)
    w_hat = w.abs().amax(1, keepdim=True) * torch.where(w < 0, -1.0, 1.0)
    x_hat = 1.5 * torch.where(x.detach() < 0, -1.0, 1.0)
    torch.testing.assert_close(y.detach(), x_hat @ w_hat.T)
    torch.testing.assert_close(x.grad, (g @ w_hat) * (x.detach().abs() <= 1.5))
    torch.testing.assert_close(torch.as_tensor(layer.weight.grad), g.T @ x_hat)
    serves_what_it_trained(layer, x, bits=1)


def test_int4() -> None:
    layer, x = layer_in(int4_training(edge_bits=None)), torch.randn(20, 32).relu().requires_grad_()
    with qtorch.kernels.record_kernels() as kernels:
        y = layer(x)
    assert "int_matmul" in kernels
    scale = x.detach().amax(1, keepdim=True) / 15
    x_hat = (x.detach() / scale).round() * scale
    w = layer.weight.master.detach()
    step = w.abs().amax(1, keepdim=True) / 7
    w_hat = (w / step).round() * step
    torch.testing.assert_close(y.detach(), x_hat @ w_hat.T, rtol=1e-4, atol=1e-5)
    g = torch.randn_like(y)
    y.backward(g)
    torch.testing.assert_close(x.grad, g @ w_hat)
    torch.testing.assert_close(torch.as_tensor(layer.weight.grad), g.T @ x.detach())
    serves_what_it_trained(layer, x, bits=4)


@pytest.mark.parametrize("recipe", [binary_training(), int4_training()], ids=str)
def test_edges(recipe: object) -> None:
    """The first and the last weight have 8 bits, and so do their activations."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    quantize_(model, recipe)
    forwards = [module.weight.training_spec.output for module in model]
    codes = [(f.lhs.code_range[1] - f.lhs.code_range[0], f.rhs.dtype.bits) for f in forwards]
    inner = 1 if recipe.name == "binary_training" else 4
    assert codes == [(254, 8), *[(2**inner - 1, inner)] * 2, (254, 8)]
    model(torch.randn(3, 8)).sum().backward()
    quantize_(model, convert())
    assert [m.weight.scheme.weight.dtype.bits for m in model] == [8, inner, inner, 8]


def test_binary_mappings_and_what_does_not_fit() -> None:
    teacher = torch.sign(torch.randn(1, 32))
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 2))
    quantize_(model, {"0": binary_training(edge_bits=None), "2": None})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(80):
        x: Tensor = torch.sign(torch.randn(128, 32))
        loss = nn.functional.cross_entropy(model(x), ((x * teacher).sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    refuses("bound is positive, got 0", lambda: binary_training(0))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    report = quantize_(model, {r"0|2": None, r".*": training.nvfp4_training()})
    assert [layer.name for layer in report.quantized] == ["1.weight"]
    assert isinstance(model[1].weight, training.MasterWeight)
    for size in (3, 1, 0):
        refuses("hadamard is a power of two", lambda size=size: GemmSpec(hadamard=size))
    refuses("leave out fold, mid_alpha and hadamard", lambda: GemmSpec(reuse_forward=True, hadamard=16))
    with pytest.raises(ValueError, match=r"block_size \(16, 16\) does not divide"):
        quantize_(nn.Sequential(nn.Linear(64, 40)), training.nvfp4_training())
    rotated = training.mixed_precision_training(TrainingSpec(GemmSpec(nvfp4_spec(), nvfp4_spec(), hadamard=16)))
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, rotated)
    refuses(r"varies by call \(GemmSpec.fold, mid_alpha, hadamard\)", lambda: quantize_(model, training.convert()))


RECIPES = {"nvfp4": training.nvfp4_training, "mxfp4": training.mxfp4_training}
every_format = pytest.mark.parametrize("name", RECIPES)


@every_format
def test_gradients_have_no_bias_and_nothing_clips(name: str) -> None:
    """The mean of many is that of the weight as the forward has it; one has the error of the format."""
    spec = RECIPES[name]().training_spec()
    x, w, g = torch.randn(64, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True), torch.randn(64, 32)
    wanted = g @ spec.output.rhs.fake_quantize(w.detach())
    draws = [torch.autograd.grad(contraction(x, w, spec), (x, w), g) for _ in range(100)]
    (one, of_w), mean, mean_w = draws[0], *(torch.stack(each).mean(0) for each in zip(*draws))
    assert 12 < compute_error(wanted, one) < 20
    assert 18 < compute_error(wanted, mean) - compute_error(wanted, one) < 22  # 100 independent errors: 20 dB
    # Of x, which is rounded to nearest, the transform makes most of the error random.
    assert compute_error(g.t() @ x.detach(), mean_w) - compute_error(g.t() @ x.detach(), of_w) > 15
    spec = RECIPES[name]().training_spec().grad_input.lhs
    x = torch.randn(256, 64) * torch.rand(256, 1).exp2()
    scale, _ = spec.choose_qparams(x)
    size = spec.granularity.group_size
    assert ((x.abs() / scale.float().repeat_interleave(size, 1)).amax() <= 6).item()
    nearest = RECIPES[name](stochastic_rounding=False).training_spec().grad_input.lhs
    clipped = x.abs() / nearest.choose_qparams(x)[0].float().repeat_interleave(size, 1)
    assert clipped.amax() > 6


def test_ms_eden_has_no_bias_and_less_than_half_the_error() -> None:
    """Of stochastic rounding. Rounding to nearest has a bias, which the correction removes; no row loses another."""
    eden, noisy = (training.nvfp4_training(ms_eden=on).training_spec() for on in (True, False))
    x = torch.randn(64, 256) * torch.rand(64, 1).exp()
    x[:, 3] *= 10

    def draws(gemm: GemmSpec, corrected: bool) -> tuple[Tensor, Tensor]:
        """Squared error, and the part along x, of 100 draws."""
        found = []
        for _ in range(100):
            a, identity = transformed(x, torch.eye(256), gemm.hadamard)
            operand = quantize_operand(a, gemm.lhs, tokens=True)
            found.append((unbiased(a, operand, 128) if corrected else operand).dequantize(torch.float32) @ identity.t())
        found = torch.stack(found)
        return (found - x).square().sum((1, 2)).mean() / x.square().sum(), (found * x).sum((1, 2)) / x.square().sum()

    (error, along), (of_nearest, shorter) = draws(eden.grad_input, True), draws(eden.grad_input, False)
    bound = 5 * along.std() / 10
    assert (along.mean() - 1).abs() < bound < 0.2 * (1 - shorter.mean())
    assert of_nearest < error < 0.5 * draws(noisy.grad_weight, False)[0]
    g, w = torch.randn(64, 32), torch.randn(32, 256, requires_grad=True)
    x.requires_grad_()
    for wanted, grads in zip(
        (g @ w.detach(), g.t() @ x.detach()),
        zip(*[torch.autograd.grad(contraction(x, w, eden), (x, w), g) for _ in range(100)], strict=True),
        strict=True,
    ):
        one = compute_error(wanted, grads[0])
        assert 14 < one < 20
        assert 17 < compute_error(wanted, torch.stack(grads).mean(0)) - one < 22  # 100 independent errors: 20 dB
    g[5, 3] = torch.nan
    of_x, _ = torch.autograd.grad(contraction(x, w, eden), (x, w), g)
    assert of_x.isfinite().all(1).tolist() == [row != 5 for row in range(64)]
    for wrong in (GemmSpec(hadamard=128), noisy.grad_input, training.mxfp4_training().training_spec().grad_weight):
        refuses("eden takes hadamard, and two operands such as", lambda wrong=wrong: replace(wrong, eden=True))


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


LORA_RECIPES = [
    qtorch.int8_dynamic_activation_int4_weight(), qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int4_weight_only(group_size=32), qtorch.nf4_weight_only(group_size=32),
]  # fmt: skip
every_recipe = pytest.mark.parametrize("recipe", LORA_RECIPES, ids=lambda recipe: recipe.name)


@every_recipe
def test_the_merged_weight_is_what_is_served(recipe: qtorch.quantize_api.WeightRecipe) -> None:
    model, x = mlp(), torch.randn(5, 7, 64)
    ptq = copy.deepcopy(model)
    quantize_(ptq, recipe)
    base = model[0].weight.detach().clone()
    quantize_(model, qat(recipe, lora_rank=4, lora_alpha=8.0))
    assert compute_error(ptq(x), model(x)) > 70, "b is zero: it starts from the quantized base"
    losses = fit(model, 8)
    assert losses[-1] < losses[0]
    assert torch.equal(model[0].weight, base)
    merged = (base + 2 * model[0].lora_b @ model[0].lora_a).detach()
    assert 5 < compute_error(merged, base) < 60
    quantize_(model, convert())
    assert torch.equal(model[0].weight.dequantize(), recipe.apply(merged).dequantize())


def test_errors_and_gradients() -> None:
    model = mlp()
    quantize_(model, qat(LORA_RECIPES[0], lora_rank=4))
    assert isinstance(model[0], LoRALinear)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["0.bias", "0.lora_a", "0.lora_b", "2.lora_a", "2.lora_b"]
    assert (model[0].lora_a.shape, model[0].lora_b.shape) == ((4, 64), (96, 4))
    layer, x = nn.Linear(64, 96), torch.randn(5, 64)
    quantize_(layer, qat(LORA_RECIPES[1], lora_rank=4, lora_alpha=2.0))
    nn.init.normal_(layer.lora_b)
    g = torch.randn(5, 96)
    spec = LORA_RECIPES[1].linear_spec()
    w = (layer.weight + 0.5 * layer.lora_b @ layer.lora_a).detach().requires_grad_()
    whole = w + (spec.weight.fake_quantize(w) - w).detach()
    (of_w,) = torch.autograd.grad(nn.functional.linear(spec.activation.fake_quantize(x), whole, layer.bias), w, g)
    of_a, of_b = torch.autograd.grad(layer(x), [layer.lora_a, layer.lora_b], g)
    assert compute_error(0.5 * layer.lora_b.t() @ of_w, of_a) > 100
    assert compute_error(0.5 * of_w @ layer.lora_a.t(), of_b) > 100
    recipe = LORA_RECIPES[1]
    refuses(r"lora_qat: recipe takes an inference recipe .*, got 4", lambda: lora_qat(4, 4), TypeError)
    refuses("the rank of adapters is 1 or more, got 0", lambda: qat(recipe, lora_rank=0, lora_alpha=8.0))
    refuses("alpha is a positive number, got -1.0", lambda: qat(recipe, lora_rank=4, lora_alpha=-1.0))
    refuses("adapters have no schedule and no observer", lambda: qat(recipe, lora_rank=4, start_step=10))
    model = nn.ModuleDict({"embed": nn.Embedding(48, 64), "head": nn.Linear(64, 48)})
    with pytest.raises(ValueError, match=r"embed: adapters are for nn\.Linear, exactly"):
        quantize_(model, {"embed": qat(recipe, lora_rank=4)})
    refuses(r"head: rank 49 exceeds the weight's shape \(48, 64\)", lambda: quantize_(model, qat(recipe, lora_rank=49)))
    model["other"] = nn.Linear(64, 48)
    model["other"].weight = model["head"].weight
    with pytest.raises(ValueError, match="head: adapters are for one layer, the weight is shared by 2"):
        quantize_(model, qat(recipe, lora_rank=4))
    assert type(model["head"]) is nn.Linear
