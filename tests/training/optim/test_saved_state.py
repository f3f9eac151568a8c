"""States of optimizers: saved, loaded, and kept on the CPU."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from qtorch import quantize_
from qtorch.dtypes.blocked_tensor import BlockedTensor
from qtorch.training import int8_weight_only_quantized_training, optim
from qtorch.training.optim import Adam8bit, AdamW4bit, AdamW8bit, CPUOffloadOptimizer, _AdamW
from tests.movement.holding import through_file
from tests.refusals import refuses
from tests.training.small_model import ALL, cosine, loss_of, make_model, muon, parameters_of, train

STEPS, CUT = 8, 5


def qgalore(parameters: Iterable[torch.nn.Parameter], **arguments: Any) -> torch.optim.Optimizer:
    return optim.QGaLoreAdamW8bit(parameters, rank=16, update_proj_gap=3, **arguments)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    f"{name} {more}": (cls, more)
    for name, cls in ALL.items()
    for more in ({}, {"bf16_stochastic_round": True}, {"amsgrad": True})
}
for _cls in (torch.optim.AdamW, AdamW8bit):
    for _way in ("on the CPU", "copied", "copied with its gradients"):
        _more = {"optimizer_class": _cls, "offload_gradients": _way.endswith("gradients")}
        OPTIMIZERS[f"{_cls.__name__} {_way}"] = (optim.CPUOffloadOptimizer, _more)
OPTIMIZERS |= {"Q-GaLore": (qgalore, {}), "Q-GaLore of codes": (qgalore, {})}
OPTIMIZERS |= {"Muon": (muon, {"bf16_stochastic_round": True}), "Muon of codes": (muon, {"ns_int8": True})}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_changes_nothing(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, more = OPTIMIZERS[name]
    if "copied" in name:  # as if parameters were on another device
        monkeypatch.setattr(optim.CPUOffloadOptimizer, "_offloads", lambda self, p: p.numel() >= self._minimal_size)

    def start() -> tuple[torch.nn.Module, Any, Any]:
        model = make_model(dtype, seed=3)
        if "codes" in name:
            quantize_(model, int8_weight_only_quantized_training())
        optimizer = cls(model.parameters(), lr=1e-2, **more)
        return model, optimizer, cosine(optimizer, STEPS)

    model, optimizer, scheduler = parts = start()
    train(model, optimizer, range(CUT), scheduler)
    saved = through_file([part.state_dict() for part in parts])
    torch.manual_seed(5)
    train(model, optimizer, range(CUT, STEPS), scheduler)
    whole = parameters_of(model)
    model, optimizer, scheduler = parts = start()
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    torch.manual_seed(5 if "codes" in name else 99)  # none but codes draw from torch's generator
    train(model, optimizer, range(CUT, STEPS), scheduler)
    assert all(map(torch.equal, whole, parameters_of(model)))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_torch(name: str, fused: bool, dtype: torch.dtype) -> None:
    """Its moments are quantized, and training goes on as if it had used them from the start."""
    model = make_model(dtype)
    twin = torch.optim.AdamW if "W" in name else torch.optim.Adam
    optimizer = twin(model.parameters(), lr=1e-2, fused=fused, amsgrad=True)
    train(model, optimizer, range(20))
    ours = ALL[name](model.parameters(), lr=1.0)
    ours.load_state_dict(through_file(optimizer.state_dict()))
    group = ours.param_groups[0]
    assert group["lr"] == 1e-2
    assert group["amsgrad"]
    assert "fused" not in group
    for parameter in model.parameters():
        state, theirs = ours.state[parameter], optimizer.state[parameter]
        assert state["step"] == 20
        assert state["step"].device.type == "cpu"
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            quantized = name != "_AdamW" and parameter.numel() >= 4096
            assert isinstance(state[key], BlockedTensor) == quantized
            value = state[key].dequantize() if quantized else state[key]
            assert (value - theirs[key].float()).norm() <= (0.25 if quantized else 0) * theirs[key].float().norm()
    before = train(model, torch.optim.SGD(model.parameters(), lr=0.0), range(20, 21))
    assert train(model, ours, range(20, 40)) < before


def test_from_another_form() -> None:
    """The form is that of the optimizer that loads; moments go over fp32."""
    model = make_model()
    optimizer = AdamW8bit(model.parameters(), lr=1e-2)
    train(model, optimizer, range(5))
    for cls, dtype in ((AdamW4bit, "uint4"), (Adam8bit, "uint8")):
        other = cls(model.parameters())
        other.load_state_dict(optimizer.state_dict())
        weight = model[0].weight
        state = other.state[weight]["exp_avg"]
        assert state.scheme.weight.dtype.name == dtype
        was = optimizer.state[weight]["exp_avg"].dequantize()
        assert (state.dequantize() - was).norm() <= 0.3 * was.norm()
        assert other.param_groups[0]["optim_bits"] == (4 if cls is AdamW4bit else 8)
    plain = _AdamW(model.parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert torch.equal(plain.state[weight]["exp_avg_sq"], optimizer.state[weight]["exp_avg_sq"].dequantize())


def test_hooks_see_tensors() -> None:
    model = make_model()
    optimizer = AdamW8bit(model.parameters())
    train(model, optimizer, range(1))
    seen = []

    def before(_: Any, state: dict[str, Any]) -> None:
        seen.append(type(state["state"][0]["exp_avg"]))

    def after(optimizer: Any) -> None:
        seen.append(type(optimizer.state[model[0].weight]["exp_avg"]))

    other = AdamW8bit(model.parameters())
    other.register_load_state_dict_pre_hook(before)
    other.register_load_state_dict_post_hook(after)
    for _ in range(2):
        other.load_state_dict(optimizer.state_dict())
    assert seen == [BlockedTensor] * 4


def test_refusals_and_tables() -> None:
    model = make_model()
    optimizer = AdamW8bit(model.parameters())
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        AdamW8bit([{"params": [p]} for p in model.parameters()]).load_state_dict(state)
    refuses("exp_avg of shape", lambda: AdamW8bit(list(model.parameters())[::-1]).load_state_dict(state))
    theirs = torch.optim.AdamW(model.parameters(), maximize=True)
    refuses("no maximize=True", lambda: optimizer.load_state_dict(theirs.state_dict()))
    train(model, theirs := torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), range(1))
    refuses("AdamW8bit has no momentum_buffer", lambda: optimizer.load_state_dict(theirs.state_dict()))
    model = make_model()
    optimizer = AdamW8bit(model.parameters())
    train(model, optimizer, range(1))
    optimizer.load_state_dict(through_file(optimizer.state_dict()))
    tables = {optimizer.state[model[i].weight]["exp_avg"].table.data_ptr() for i in (0, 2)}
    assert len(tables) == 1


CLASSES = [torch.optim.AdamW, AdamW8bit]


@pytest.fixture(params=["plain", "copied", "gradients offloaded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments."""
    if request.param != "plain":
        monkeypatch.setattr(CPUOffloadOptimizer, "_offloads", lambda self, p: p.numel() >= self._minimal_size)
    return {"offload_gradients": request.param == "gradients offloaded"}


def clip(model: torch.nn.Module, optimizer: Any) -> torch.Tensor:
    if isinstance(optimizer, CPUOffloadOptimizer):
        return optimizer.clip_grad_norm_(0.1)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def run(model: torch.nn.Module, optimizer: Any, steps: range, scheduler: Any) -> None:
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


def test_gradients_leave_the_device_and_the_norm(way: dict[str, Any]) -> None:
    model = make_model()
    optimizer = CPUOffloadOptimizer(model.parameters(), AdamW8bit, **way)
    loss_of(model, 0).backward()
    assert (model[0].weight.grad is None) == way["offload_gradients"]
    assert model[0].bias.grad is not None, "small parameters stay"
    optimizer.zero_grad()
    before = parameters_of(model)
    optimizer.step()
    assert all(map(torch.equal, before, parameters_of(model))), "there is no gradient"
    model = make_model()
    reference = copy.deepcopy(model)
    optimizer = CPUOffloadOptimizer(model.parameters(), AdamW8bit, **way)
    for m in (model, reference):
        loss_of(m, 0).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.1), expected)


def test_state_and_refusals() -> None:
    """The checkpoint of torch's AdamW, into AdamW8bit on the CPU."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    offloaded = CPUOffloadOptimizer(model.parameters(), AdamW8bit)
    offloaded.load_state_dict(optimizer.state_dict())
    assert offloaded.param_groups[0]["lr"] == 1e-2
    assert offloaded.state_dict()["state"][0]["step"] == 3
    train(model, offloaded, range(3, 5))
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
