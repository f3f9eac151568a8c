"""CPUOffloadOptimizer: equal to the optimizer that it runs, with schedulers, clipping, accumulation and checkpoints.

Without a GPU the parameters lie on the CPU; `_offloads` is then made to say that they have to be copied all the same.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from qtorch.training.optim import AdamW8bit, CPUOffloadOptimizer
from tests.refusals import refuses
from tests.training.small_model import cosine, loss_of, make_model, parameters_of, train

CLASSES = [torch.optim.AdamW, AdamW8bit]


@pytest.fixture(params=["plain", "copied", "gradients offloaded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments."""
    if request.param != "plain":
        monkeypatch.setattr(CPUOffloadOptimizer, "_offloads", lambda self, p: p.numel() >= self._minimal_size)
    return {"offload_gradients": request.param == "gradients offloaded"}


def clip(model: nn.Module, optimizer: Any) -> torch.Tensor:
    if isinstance(optimizer, CPUOffloadOptimizer):
        return optimizer.clip_grad_norm_(0.1)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def run(model: nn.Module, optimizer: Any, steps: range, scheduler: Any) -> None:
    """Each step adds the gradients of two batches and clips them."""
    for step in steps:
        optimizer.zero_grad()
        for half in range(2):
            loss_of(model, 2 * step + half).backward()
        clip(model, optimizer)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("cls", CLASSES)
def test_equals_the_optimizer_that_it_runs(cls: type[torch.optim.Optimizer], way: dict[str, Any]) -> None:
    results = []
    for wrapped in (False, True):
        model = make_model()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.1, "lr": 3e-3}]
        more = {"fused": True} if cls is torch.optim.AdamW else {}
        optimizer = CPUOffloadOptimizer(groups, cls, lr=1e-2, **way) if wrapped else cls(groups, lr=1e-2, **more)
        run(model, optimizer, range(5), cosine(optimizer, 5))
        results.append(parameters_of(model))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)
    start = parameters_of(make_model())
    assert not any(map(torch.equal, results[1], start))


def test_gradients_leave_the_device(way: dict[str, Any]) -> None:
    model = make_model()
    optimizer = CPUOffloadOptimizer(model.parameters(), AdamW8bit, **way)
    loss_of(model, 0).backward()
    assert (model[0].weight.grad is None) == way["offload_gradients"]
    assert model[0].bias.grad is not None, "small parameters stay"
    optimizer.zero_grad()
    before = parameters_of(model)
    optimizer.step()
    assert all(map(torch.equal, before, parameters_of(model))), "there is no gradient"


def test_the_norm_is_that_of_all(way: dict[str, Any]) -> None:
    model = make_model()
    reference = copy.deepcopy(model)
    optimizer = CPUOffloadOptimizer(model.parameters(), AdamW8bit, **way)
    for m in (model, reference):
        loss_of(m, 0).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.1), expected)


def test_state_of_one_optimizer() -> None:
    """The checkpoint of torch's AdamW, into AdamW8bit on the CPU."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    offloaded = CPUOffloadOptimizer(model.parameters(), AdamW8bit)
    offloaded.load_state_dict(optimizer.state_dict())
    assert offloaded.param_groups[0]["lr"] == 1e-2
    assert offloaded.state_dict()["state"][0]["step"] == 3
    train(model, offloaded, range(3, 5))


def test_refusals() -> None:
    model = make_model()
    optimizer = CPUOffloadOptimizer(model.parameters())
    with pytest.raises(ValueError, match="other parameter groups"):
        optimizer.load_state_dict(torch.optim.AdamW(list(model.parameters())[:1]).state_dict())
    refuses("can't be copied", lambda: copy.deepcopy(optimizer), TypeError)
    refuses("minimal_size", lambda: CPUOffloadOptimizer(model.parameters(), minimal_size=-1))


@pytest.mark.gpu
@pytest.mark.parametrize("offload_gradients", [False, True])
def test_on_cuda(offload_gradients: bool) -> None:
    results = []
    for wrapped in (False, True):
        model = make_model().cuda()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if wrapped:
            optimizer = CPUOffloadOptimizer(model.parameters(), lr=1e-2, offload_gradients=offload_gradients)
        for step in range(5):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        results.append(parameters_of(model))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
