"""Weights that live in INT8 and INT4: updates that round stochastically, and no float copy."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from qtorch import quantize_
from qtorch.training import CodesWeight, int4_weight_only_quantized_training, int8_weight_only_quantized_training

RECIPES = [int8_weight_only_quantized_training(), int4_weight_only_quantized_training()]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def weight(recipe: object = RECIPES[0], n: int = 32, k: int = 64) -> CodesWeight:
    return recipe.apply(torch.randn(n, k))


def test_starts_from_the_nearest_codes() -> None:
    values = torch.randn(32, 64)
    trained = RECIPES[0].apply(values)
    assert ((trained.dequantize() - values).abs() <= trained.scales()[0] / 2 * 1.0001).all()
    assert torch.equal(trained.dequantize(), RECIPES[0].apply(values).dequantize())


@every_recipe
def test_updates_are_unbiased(recipe: object) -> None:
    """The mean of 10^5 roundings of one row is within 4 standard errors of the row."""
    count = 100_000
    row = torch.randn(64)
    trained = recipe.apply(torch.zeros(count, 64))
    trained.copy_(row.expand(count, 64))
    samples = trained.dequantize().double()
    scale = trained.scales()[0].double().repeat_interleave(64 // trained.scales()[0].shape[1], 1)
    assert (samples - row).abs().max() <= scale.max() * 1.0001
    error = (samples.mean(0) - row).abs()
    assert (error <= 4 * samples.std(0) / count**0.5 + 1e-7).all()
    assert samples.std(0).median() > 0.2 * scale.mean()


@every_recipe
def test_reproducible_from_a_seed_and_different_at_each_step(recipe: object) -> None:
    start, step = weight(recipe), torch.full((32, 64), 1e-3)
    results = []
    for seed in (3, 3, 4):
        trained = start.clone()
        torch.manual_seed(seed)
        first = trained.add_(step).dequantize().clone()
        second = trained.copy_(start).add_(step).dequantize().clone()
        assert not torch.equal(first, second)
        results.append(first)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_shards_of_different_ranks_draw_different_numbers() -> None:
    start, results = weight(), []
    for rank in (0, 1, 1):
        shard = start.clone()
        vars(shard)["_rank"] = rank
        torch.manual_seed(0)
        results.append(shard.add_(1e-3).dequantize())
    assert torch.equal(results[1], results[2])
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("stochastic", [True, False])
def test_small_updates_add_up_only_if_rounded_stochastically(stochastic: bool) -> None:
    """A hundred updates of a hundredth of a step."""
    trained = int8_weight_only_quantized_training(stochastic_rounding=stochastic).apply(torch.rand(256, 64) - 0.5)
    before, step = trained.dequantize().clone(), trained.scales()[0].mean()
    for _ in range(100):
        trained.add_(torch.full((256, 64), 0.01) * step)
    moved = ((trained.dequantize() - before).mean() / step).item()
    assert (0.9 < moved < 1.1) if stochastic else abs(moved) < 0.2


def test_weight_decay_is_exact() -> None:
    """It is a factor of the scale: no code changes."""
    trained = weight()
    codes, values = trained.plain()[0].clone(), trained.dequantize()
    trained.mul_(0.99)
    torch._foreach_mul_([trained], 0.5)
    assert torch.equal(trained.plain()[0], codes)
    torch.testing.assert_close(trained.dequantize(), values * 0.495)
    trained.mul_(-1.0)
    torch.testing.assert_close(trained.dequantize(), values * -0.495, rtol=0, atol=0.02)


@every_recipe
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_memory_no_float_copy_is_kept(recipe: object, kind: type, how: dict) -> None:
    """After a step the only float tensors of a weight's size are its gradient and the optimizer's state."""
    gc.freeze()  # what was there before is not looked through
    model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(3)])
    quantize_(model, recipe)
    optimizer = kind(model.parameters(), lr=1e-3, **how)
    model(torch.randn(4, 128)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {id(t) for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)}
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) is Tensor and o.numel() == 128 * 128]
    gc.unfreeze()
    assert [o for o in tensors if o.is_floating_point() and id(o) not in state] == []
    assert sum(p.nbytes for p in model.parameters()) < (0.27 if "int8" in recipe.name else 0.16) * 3 * 128 * 128 * 4


def test_memory_one_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreach update of many weights holds the float values of one."""
    alive: list[weakref.ref] = []
    most = 0
    dequantize = CodesWeight.dequantize

    def counted(self: CodesWeight, dtype: torch.dtype | None = None) -> Tensor:
        nonlocal most
        values = dequantize(self, dtype)
        alive.append(weakref.ref(values))
        most = max(most, sum(ref() is not None for ref in alive))
        return values

    monkeypatch.setattr(CodesWeight, "dequantize", counted)
    weights = [weight() for _ in range(8)]
    torch._foreach_addcdiv_(weights, [torch.ones(32, 64)] * 8, [torch.ones(32, 64)] * 8, -1e-3)
    assert len(alive) == 8
    assert most == 1


def test_peak_memory_of_a_step_is_that_of_codes() -> None:
    """What autograd keeps for the backward of a layer is the codes, not floats."""
    layer, saved = nn.Linear(256, 256, bias=False), []
    quantize_(nn.Sequential(layer), RECIPES[0])

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(2, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    kept = sorted((t.nbytes, t.dtype) for t in saved)
    assert kept == [(256 * 4, torch.float32), (x.nbytes, torch.float32), (256 * 256, torch.int8)]


def test_gradients_are_those_of_the_dequantized_weight() -> None:
    layer = nn.Linear(64, 32)
    quantize_(nn.Sequential(layer), RECIPES[0])
    twin = nn.Linear(64, 32)
    twin.load_state_dict({"weight": layer.weight.dequantize(), "bias": layer.bias.detach()})
    x = torch.randn(5, 7, 64)
    grads = []
    for module in (layer, twin):
        inputs = x.clone().requires_grad_()
        module(inputs).square().sum().backward()
        grads.append((inputs.grad, module.weight.grad, module.bias.grad))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adamax])
def test_other_optimizers(kind: type) -> None:
    layer = nn.Linear(64, 32)
    quantize_(nn.Sequential(layer), RECIPES[0])
    before, optimizer = layer.weight.dequantize(), kind(layer.parameters(), lr=0.01)
    layer(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    assert (layer.weight.dequantize() - before).abs().mean() > 1e-3


def test_an_optimizer_that_updates_parts_is_an_error() -> None:
    """A part has no scales of its own."""
    parameter = nn.Parameter(weight())
    with torch.no_grad(), pytest.raises((NotImplementedError, ValueError), match="part of"):
        parameter[:, :7].add_(1.0)


def test_a_copy_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"the target has shape \(32, 64\), the source \(64, 32\)"):
        weight().copy_(torch.randn(64, 32))


def test_zeros_like_is_a_plain_tensor() -> None:
    zeros = torch.zeros_like(weight(), memory_format=torch.preserve_format)
    assert type(zeros) is Tensor
    assert torch.equal(zeros, torch.zeros(32, 64))
