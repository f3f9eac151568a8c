"""save_in_codes: gradients are those of inputs as their codes have them, and the memory is that of the codes."""

import contextlib
import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import qtorch
from qtorch import PerAxis, PerGroup, QuantSpec, quantize_, training
from qtorch.primitives import MappingType, Rounding, ZeroPointDomain, nvfp4_spec, qdtype
from qtorch.training import int8_mixed_precision_training, int8_tilewise_training, save_in_codes, saved_tensors

FP32 = torch.float32
SPECS = {
    "int8": saved_tensors.INT8,
    "uint4": QuantSpec("uint4", PerGroup(32), MappingType.ASYMMETRIC, ZeroPointDomain.OFFSET, scale_dtype=FP32),
    "float8": QuantSpec(qdtype("float8_e4m3fn"), PerGroup(128), scale_dtype=FP32),
}
BITS = {"int8": 8.5, "uint4": 6.0, "float8": 8.25}
"""With fp32 scales, and zero points."""


def rounded(x: Tensor, spec: QuantSpec) -> Tensor:
    """Groups follow the memory, and the last one is completed with zeros."""
    size = spec.granularity.group_size  # type: ignore[attr-defined]
    flat = functional.pad(x.detach().reshape(-1), (0, -x.numel() % size)).view(-1, size)
    return spec.fake_quantize(flat.float()).view(-1)[: x.numel()].view(x.shape).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_those_of_codes(name: str, dtype: torch.dtype) -> None:
    """Of a layer behind another function: y is the same, dw is g^T x_hat, dx is the same."""
    spec = SPECS[name]
    torch.manual_seed(0)
    x = torch.randn(50, 100, requires_grad=True, dtype=dtype)
    w = torch.randn(30, 100, requires_grad=True, dtype=dtype)
    g = torch.randn(50, 30, dtype=dtype)
    plain = functional.linear(x * 2, w)
    with save_in_codes(spec):
        y = functional.linear(x * 2, w)
    assert torch.equal(y, plain)
    of_x, of_w = torch.autograd.grad(y, (x, w), g)
    assert torch.equal(of_x, torch.autograd.grad(plain, x, g, retain_graph=True)[0])
    x_hat = rounded(x * 2, spec)
    assert not torch.equal(x_hat, x * 2)
    assert torch.equal(of_w, g.t() @ x_hat)


@pytest.mark.parametrize("name", SPECS)
def test_memory_is_that_of_codes(name: str) -> None:
    """The floats are gone after the forward; what several operators save is quantized once."""
    context = save_in_codes(SPECS[name])
    layers = [nn.Linear(64, 128) for _ in range(3)]
    x = torch.randn(64, 64, requires_grad=True)
    with context:
        h = x.sin()
        memory = StorageWeakRef(h.untyped_storage())
        outputs = [layer(h) for layer in layers] + [functional.linear(h.view(8, 8, 64), layers[0].weight)]
        outputs.append(functional.linear(h.t(), layers[0].weight))
        del h
    assert memory.expired()
    (codes,) = [codes for codes in context.known.values() if codes.codes.shape[0] * context.size == 64 * 64]
    parts = [codes.codes, codes.scale, codes.zero_point]
    assert sum(part.nbytes for part in parts if part is not None) * 8 == BITS[name] * 64 * 64
    sum(output.sum() for output in outputs).backward()
    del codes, outputs
    assert not context.known


class Saves(torch.autograd.Function):
    """The gradient of each input is the input, as it was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        ctx.form = x.shape, x.stride()
        return x.clone()


VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "heads": lambda x: x.view(64, 4, 32).permute(1, 0, 2),
    "a part": lambda x: x[:, :100],
    "every other": lambda x: x[::2],
    "expanded": lambda x: x[None].expand(3, 64, 128),
    "later": lambda x: x.view(-1)[128:],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str) -> None:
    """All forms of one tensor, with other values and another one of the same form between them."""
    context, got, forms = save_in_codes(), [], []
    for seed in range(3):
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        with context:
            part = VIEWS[view](x * 1)
            out = Saves.apply(part)
        (grad,) = torch.autograd.grad(out, part)
        forms.append((grad.shape, part.shape))
        got.append((grad - part).abs().max() / part.abs().max())
        del out, part, grad, x
    assert all(one == other for one, other in forms)
    assert all(0 < error < 1.01 / 254 for error in got)


def test_memory_that_is_used_again() -> None:
    """A tensor in the memory of one that is gone has codes of its own."""
    context = save_in_codes()
    x = torch.randn(64, 64, requires_grad=True)
    with context:
        kept = [Saves.apply(x * factor) for factor in range(1, 20)]  # the product is freed at once
    for factor, out in enumerate(kept, 1):
        (grad,) = torch.autograd.grad(out, x)
        torch.testing.assert_close(grad, x.detach() * factor * factor, rtol=0, atol=0.02 * factor * factor)


def test_a_change_in_place_has_other_codes() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    w = torch.randn(64, 64, requires_grad=True)
    with save_in_codes():
        h = x * 1
        first = h @ w
        h.mul_(3)
        second = h @ w
    spec = SPECS["int8"]
    (once,) = torch.autograd.grad(first.sum(), w, retain_graph=True)
    (thrice,) = torch.autograd.grad(second.sum(), w)
    assert torch.equal(once, rounded(x * 1, spec).t() @ torch.ones(64, 64))
    assert torch.equal(thrice, rounded(x * 1 * 3, spec).t() @ torch.ones(64, 64))


def test_what_is_kept_as_it_is() -> None:
    """Parameters, small tensors, inputs of the model, integers, logarithms of probabilities."""
    x, table = torch.randn(64, 64, requires_grad=True), nn.Embedding(10, 512)
    w = nn.Parameter(torch.randn(64, 64))
    functions = {
        "a parameter": lambda: (x @ w).sum(),
        "its transpose": lambda: functional.linear(x, w.t()).sum(),
        "its copy": lambda: functional.linear(x.view(16, 256), w[:32].bfloat16().float().view(8, 256)).sum(),
        "an exponent": lambda: functional.cross_entropy(x * 2, torch.arange(64)),
        "small": lambda: (x[:20] * 2).square().sum(),
        "integers": lambda: table(torch.arange(10)).sum(),
    }
    for name, function in functions.items():
        context = save_in_codes()
        with context:
            y = function()
            known = len(context.known)
        of_codes = torch.autograd.grad(y, (x, w, table.weight), allow_unused=True)
        of_floats = torch.autograd.grad(function(), (x, w, table.weight), allow_unused=True)
        assert not known, name
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(of_codes, of_floats, strict=True)), name


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean of many gradients is that of floats: nearer by the root of their number, and no nearer."""
    spec = replace(SPECS["uint4"], rounding=Rounding.STOCHASTIC)
    torch.manual_seed(0)
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    g, draws = torch.randn(64, 64), 400
    gradients = []
    for _ in range(draws):
        with save_in_codes(spec):
            y = (x * 1) @ w
        gradients.append(torch.autograd.grad(y, w, g)[0])
    exact = x.detach().t() @ g
    one = torch.stack([(gradient - exact).norm() for gradient in gradients]).mean()
    ratio = (torch.stack(gradients).mean(0) - exact).norm() / one * draws**0.5
    assert 0.9 < ratio < 1.1


RECIPES = {"float": None, "int8": int8_mixed_precision_training(), "tiles": int8_tilewise_training()}


@pytest.mark.parametrize("how", ["eager", "checkpoint", "compiled", "autocast"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_models(recipe: str, how: str) -> None:
    """A block with attention: the loss is the same, gradients are near, in each mode and with recipes for training."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    if RECIPES[recipe] is not None:
        quantize_(model, {r"linear\d": RECIPES[recipe]})
    run = torch.compile(model) if how == "compiled" else model
    x = torch.randn(4, 64, 64)
    found = []
    for context in (torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), save_in_codes()):
        torch.manual_seed(1)
        with context, torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            leaf = x.clone().requires_grad_()
            y = checkpoint(run, leaf, use_reentrant=False) if how == "checkpoint" else run(leaf)
            loss = y.float().square().mean()
        found.append((loss.detach(), torch.autograd.grad(loss, [leaf, *model.parameters()])))
    (plain, wanted), (loss, got) = found
    assert torch.equal(loss, plain)
    floats = torch.cat([part.flatten() for part in wanted]).float()
    error = (torch.cat([part.flatten() for part in got]).float() - floats).norm() / floats.norm()
    assert 1e-4 < error < 0.03 if how != "checkpoint" else error < 0.03


def test_learned_steps_see_their_rounding_errors() -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    quantize_(model, training.lsq(4, 8))
    x, step, found = torch.randn(256, 128), model[2].input_quantizer.log_scale, []
    for context in (contextlib.nullcontext(), save_in_codes()):
        with context:
            loss = functional.mse_loss(model(x), x)
        found.append(torch.autograd.grad(loss, step)[0])
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0)


def test_a_context_inside_of_a_compiled_function() -> None:
    """What is kept is up to the compiler."""
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(128, 64)

    def loss(x: Tensor) -> Tensor:
        with save_in_codes():
            return model(x).square().mean()

    wanted = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), list(model.parameters()))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_training_converges_alike() -> None:
    """30 steps end at the loss of floats, and with every other step's codes of 4 bits near it."""
    losses = []
    for context in (None, save_in_codes(), save_in_codes(SPECS["uint4"])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(30):
            x = torch.randn(128, 32, generator=torch.Generator().manual_seed(step))
            hooks = copy.copy(context) or torch.enable_grad()
            with hooks:
                loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] != losses[0]
    assert abs(losses[1] / losses[0] - 1) < 0.02
    assert abs(losses[2] / losses[0] - 1) < 0.1


def test_values_that_are_not_finite() -> None:
    """They reach the gradient, as they do from floats."""
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    for lost in (torch.inf, torch.nan):
        with save_in_codes():
            h = x * torch.where(torch.arange(64 * 64).view(64, 64) == 70, lost, 1.0)
            y = h @ w
        (grad,) = torch.autograd.grad(y, w, torch.ones_like(y))
        assert not grad.isfinite().all()


def test_refused() -> None:
    for spec in (QuantSpec(qdtype("int8"), PerAxis(0)), QuantSpec(qdtype("int8"), PerGroup(-1)), nvfp4_spec()):
        with pytest.raises(ValueError, match=r"save_in_codes: the spec has PerGroup\(group_size\)"):
            save_in_codes(spec)
    with pytest.raises(TypeError, match="save_in_codes: spec is a QuantSpec"):
        save_in_codes(qtorch.int8_weight_only())  # type: ignore[arg-type]
