"""Muon8bit against torch.optim.Muon, which has the numbers of fp32 momentum."""

from typing import Any

import pytest
import torch

from qtorch import quantize_
from qtorch.dtypes.blocked_tensor import BlockedTensor
from qtorch.training import CodesWeight, int8_mixed_precision_training, int8_weight_only_quantized_training
from qtorch.training.optim import AdamW8bit, CPUOffloadOptimizer, Muon8bit
from qtorch.training.optim.muon import orthogonal
from tests.movement.holding import through_file
from tests.refusals import refuses
from tests.training.small_model import make_model, muon, parameters_of, train

GROUP = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "eps": 1e-7}


def step(weights: list[torch.nn.Parameter], optimizers: list[Any], seed: int) -> None:
    grad = torch.randn(weights[0].shape, generator=torch.Generator().manual_seed(seed)) + 0.3
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = grad.to(weight.dtype)
        optimizer.step()


@pytest.mark.parametrize("shape", [(96, 130), (130, 64)])
@pytest.mark.parametrize("more", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}], ids=str)
def test_numbers_of_torch(shape: tuple[int, int], more: dict[str, Any]) -> None:
    """To the bit with fp32 momentum, and nearly so in 8 bits; a checkpoint of torch goes on."""
    start = torch.randn(shape)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(4)]
    optimizers = [torch.optim.Muon(weights[:1], lr=0.02, weight_decay=0.3, **more)]
    for weight, bits in zip(weights[1:], (32, 8, 4), strict=True):
        optimizers.append(Muon8bit([weight], lr=0.02, weight_decay=0.3, optim_bits=bits, **more))
    for seed in range(6):
        step(weights, optimizers, seed)
    assert torch.equal(weights[0], weights[1])
    far = [((w - weights[0]).norm() / (weights[0] - start).norm()).item() for w in weights[2:]]
    assert 1e-4 < far[0] < 0.3 * far[1] < 0.1
    held = optimizers[2].state[weights[2]]["momentum_buffer"]
    assert isinstance(held, BlockedTensor)
    assert held.nbytes < 1.2 * start.numel()
    other = torch.nn.Parameter(weights[0].detach().clone())
    resumed = Muon8bit([other], optim_bits=32)
    resumed.load_state_dict(through_file(optimizers[0].state_dict()))
    step([weights[0], other], [optimizers[0], resumed], 7)
    assert torch.equal(weights[0], other)


@pytest.mark.parametrize("recipe", [None, int8_mixed_precision_training(), int8_weight_only_quantized_training()])
def test_models_learn(recipe: Any) -> None:
    """Matrices by Muon, biases by AdamW8bit, which in one optimizer are what they are in two."""
    model = make_model()
    if recipe is not None:
        quantize_(model, recipe)
    first = train(model, torch.optim.SGD(model.parameters(), lr=0.0), range(1))
    assert train(model, muon(model.parameters(), lr=1e-2), range(40)) < 0.6 * first
    assert isinstance(model[0].weight, CodesWeight) == (recipe == int8_weight_only_quantized_training())
    one, two = make_model(), make_model()
    matrices, vectors = ([p for p in two.parameters() if (p.dim() == 2) == kind] for kind in (True, False))
    apart = [Muon8bit(matrices, lr=1e-2), AdamW8bit(vectors, lr=1e-2, eps=1e-7, weight_decay=0.1)]
    both = muon(one.parameters(), lr=1e-2)
    train(one, both, range(3))
    for i in range(3):
        two.zero_grad()
        train(two, apart[0], range(i, i + 1))
        apart[1].step()
    assert all(map(torch.equal, parameters_of(one), parameters_of(two)))


@pytest.mark.parametrize("shape", [(64, 64), (256, 96), (96, 512)])
def test_newton_schulz_in_int8(shape: tuple[int, int]) -> None:
    """As orthogonal as in bf16, though not the same numbers; singular values that differ by 100 come near 1 too."""
    x = torch.randn(shape)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    for matrix in (x, u @ torch.diag(torch.logspace(0, -2, min(shape))) @ vh):
        wanted, found = (orthogonal(matrix.bfloat16(), {**GROUP, "ns_int8": int8}).float() for int8 in (False, True))
        noise = (found - wanted).norm() / wanted.norm()
        assert 1e-3 < noise < 0.1
        errors = [(torch.linalg.svdvals(each) - 1).square().mean().sqrt().item() for each in (wanted, found)]
        assert 0.05 < errors[1] < 1.1 * errors[0] + 0.02
        assert torch.linalg.svdvals(found).amax() < 1.3


def test_models_learn_with_int8_products() -> None:
    """Three seeds: other losses than with products in bf16, of the same size."""
    for seed in range(3):
        losses = []
        for int8 in (False, True):
            torch.manual_seed(seed)
            model = make_model()
            losses.append(train(model, muon(model.parameters(), lr=1e-2, ns_int8=int8), range(40)))
        assert losses[0] != losses[1]
        assert losses[1] < 1.1 * losses[0]


def test_bf16_offload_and_refusals() -> None:
    """Rounding at random is right on average: steps far below one of bf16 add up."""
    weight = torch.nn.Parameter(torch.full((64, 128), 16.0, dtype=torch.bfloat16))
    optimizer = Muon8bit([weight], lr=0.05, weight_decay=0.0, bf16_stochastic_round=True)
    exact = torch.nn.Parameter(weight.detach().float())
    twin = Muon8bit([exact], lr=0.05, weight_decay=0.0)
    for seed in range(8):
        step([weight, exact], [optimizer, twin], seed)
    moved, wanted = weight.detach().float().mean() - 16, exact.detach().mean() - 16
    assert moved == pytest.approx(wanted.item(), abs=0.2 * abs(wanted.item()))
    layer = torch.nn.Linear(64, 64, bias=False)
    train_on = CPUOffloadOptimizer(layer.parameters(), Muon8bit, lr=1e-2)
    layer(torch.randn(4, 64)).sum().backward()
    train_on.step()
    refuses('others in a group of "use_muon": False, got shape', lambda: Muon8bit([torch.ones(8)]))
    refuses("momentum is at least 0 and less than 1", lambda: Muon8bit([torch.ones(2, 2)], momentum=1.0))
    refuses("'match_rms_adamw', got 0.95 and 'x'", lambda: Muon8bit([torch.ones(2, 2)], adjust_lr_fn="x"))
