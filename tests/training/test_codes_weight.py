"""Weights in training, in codes or as floats of their own dtype."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import qtorch
from qtorch import int4_weight_only, int8_dynamic_activation_int8_weight, quantize_, training
from qtorch.training import CodesWeight, MasterWeight, TrainingSpec, int8_weight_only_quantized_training

RECIPES = [int8_weight_only_quantized_training(), qtorch.training.int4_weight_only_quantized_training()]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def weight(recipe: object = RECIPES[0], n: int = 32, k: int = 64) -> CodesWeight:
    return recipe.apply(torch.randn(n, k))


def test_nearest_codes_and_gradients() -> None:
    values = torch.randn(32, 64)
    trained = RECIPES[0].apply(values)
    assert ((trained.dequantize() - values).abs() <= trained.scales()[0] / 2 * 1.0001).all()
    assert torch.equal(trained.dequantize(), RECIPES[0].apply(values).dequantize())
    zeros = torch.zeros_like(weight(), memory_format=torch.preserve_format)
    assert type(zeros) is Tensor
    assert torch.equal(zeros, torch.zeros(32, 64))
    # A part has no scales of its own.
    parameter = nn.Parameter(weight())
    with torch.no_grad(), pytest.raises((NotImplementedError, ValueError), match="part of"):
        parameter[:, :7].add_(1.0)
    with pytest.raises(ValueError, match=r"the target has shape \(32, 64\), the source \(64, 32\)"):
        weight().copy_(torch.randn(64, 32))
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


@every_recipe
def test_updates_are_unbiased_and_reproducible(recipe: object) -> None:
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


@pytest.mark.parametrize("stochastic", [True, False])
def test_small_updates_add_up_only_if_rounded_stochastically(stochastic: bool) -> None:
    """A hundred updates of a hundredth of a step."""
    trained = int8_weight_only_quantized_training(stochastic_rounding=stochastic).apply(torch.rand(256, 64) - 0.5)
    before, step = trained.dequantize().clone(), trained.scales()[0].mean()
    for _ in range(100):
        trained.add_(torch.full((256, 64), 0.01) * step)
    moved = ((trained.dequantize() - before).mean() / step).item()
    assert (0.9 < moved < 1.1) if stochastic else abs(moved) < 0.2


def test_decay_and_shards() -> None:
    """It is a factor of the scale: no code changes."""
    trained = weight()
    codes, values = trained.plain()[0].clone(), trained.dequantize()
    trained.mul_(0.99)
    torch._foreach_mul_([trained], 0.5)
    assert torch.equal(trained.plain()[0], codes)
    torch.testing.assert_close(trained.dequantize(), values * 0.495)
    trained.mul_(-1.0)
    torch.testing.assert_close(trained.dequantize(), values * -0.495, rtol=0, atol=0.02)
    start, results = weight(), []
    for rank in (0, 1, 1):
        shard = start.clone()
        vars(shard)["_rank"] = rank
        torch.manual_seed(0)
        results.append(shard.add_(1e-3).dequantize())
    assert torch.equal(results[1], results[2])
    assert not torch.equal(results[0], results[1])


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


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adamax])
def test_other_optimizers(kind: type) -> None:
    layer = nn.Linear(64, 32)
    quantize_(nn.Sequential(layer), RECIPES[0])
    before, optimizer = layer.weight.dequantize(), kind(layer.parameters(), lr=0.01)
    layer(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    assert (layer.weight.dequantize() - before).abs().mean() > 1e-3


MASTER_RECIPES = [
    training.int8_mixed_precision_training(), training.float8_training(), training.mxfp8_training(),
    training.nvfp4_training(stochastic_rounding=False, hadamard=False),
    training.mxfp4_training(stochastic_rounding=False, hadamard=False), training.int8_tilewise_training(),
    training.switchback_training(), training.qat(int4_weight_only(group_size=32)),
    training.qat(int8_dynamic_activation_int8_weight()),
]  # fmt: skip
BF16 = torch.bfloat16


class OneRank:
    """A mesh of one rank."""

    def size(self) -> int:
        return 1


def layers(recipe: qtorch.recipes.base.Recipe) -> tuple[nn.Linear, nn.Linear]:
    """A layer in fp32, and the same one whose weight is of bf16 and has the bits of fp32."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=False)
    quantize_(layer, recipe)
    mixed = copy.deepcopy(layer)
    mixed._parameters["weight"] = nn.Parameter(gathered(layer.weight))
    return layer, mixed


def gathered(weight: Tensor, dtype: torch.dtype | None = BF16) -> MasterWeight:
    """What FSDP2 gets of one rank under a policy."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    shard = weight.detach()
    sent, metadata = shard.fsdp_pre_all_gather(OneRank(), weight.shape, (), None, policy)  # type: ignore[attr-defined]
    whole: MasterWeight = shard.fsdp_post_all_gather(sent, metadata, dtype)[0]  # type: ignore[attr-defined]
    return whole


@pytest.mark.parametrize("recipe", MASTER_RECIPES, ids=str)
def test_codes_and_gradients_of_a_master(recipe: qtorch.recipes.base.Recipe) -> None:
    layer, mixed = layers(recipe)
    weight = mixed.weight
    assert weight.dtype == BF16
    assert torch.equal(weight.master, layer.weight.master)
    assert not torch.equal(weight.master, weight.master.bfloat16().float())
    one, other = layer.weight.convert(), weight.convert()
    assert torch.equal(one.plain()[0], other.plain()[0])
    # The forward in bf16 takes these codes: with an input of one value each output is a sum of them.
    x = torch.eye(64)
    y, wanted = mixed(x.bfloat16()), layer(x)
    assert y.dtype == BF16
    assert torch.equal(y, wanted.bfloat16())
    assert not torch.equal(y, layer.weight.master.t().bfloat16())
    layer, mixed = layers(recipe)
    x = torch.randn(32, 64).bfloat16()
    leaves = x.clone().requires_grad_(), x.float().requires_grad_()
    mixed(leaves[0]).float().square().mean().backward()
    layer(leaves[1]).square().mean().backward()
    for got, wanted in ((mixed.weight.grad, layer.weight.grad), (leaves[0].grad, leaves[1].grad)):
        assert got is not None
        assert wanted is not None
        assert got.dtype == BF16
        # Codes of four bits that flip differ by more.
        assert 0 < float((got.float() - wanted).norm() / wanted.norm()) < (0.12 if "fp4" in recipe.name else 0.05)


def test_copies_and_what_is_sent() -> None:
    weight = layers(MASTER_RECIPES[0])[1].weight
    for other in (weight.detach(), weight[:32], weight.t(), weight.clone(), pickle.loads(pickle.dumps(weight))):
        assert isinstance(other, MasterWeight)
        assert (other.dtype, other.master.dtype) == (BF16, torch.float32)
    for dtype in (torch.float32, torch.float16):
        moved = weight.detach().to(dtype)
        assert (moved.dtype, moved.master.dtype) == (dtype, dtype)
    assert weight.detach().sum().dtype == BF16
    assert weight.dequantize().dtype == BF16
    meta = weight.detach().to("meta")
    assert (meta.dtype, meta.master.dtype) == (BF16, torch.float32)
    weight = MasterWeight.of(torch.randn(8, 16), TrainingSpec())
    assert gathered(weight).master.dtype == BF16
    assert gathered(weight, None).master.dtype == torch.float32
    assert gathered(layers(MASTER_RECIPES[0])[0].weight, None).dtype == torch.float32
