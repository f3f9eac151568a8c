"""Small models, and how tests train them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from qtorch.training import optim, parameter_groups

QUANTIZED = {n: getattr(optim, n) for n in ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8")}
ALL = {**QUANTIZED, "_AdamW": optim._AdamW}


def muon(parameters: Iterable[nn.Parameter], **arguments: Any) -> torch.optim.Optimizer:
    """Muon for matrices, AdamW8bit for the rest."""
    parameters = list(parameters)
    matrices, others = ([p for p in parameters if (p.dim() == 2) == kind] for kind in (True, False))
    return optim.Muon8bit([{"params": matrices}, {"params": others, "use_muon": False}], **arguments)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers, one without a bias, whose input has no negative numbers."""
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)).to(dtype)


def fit(model: nn.Module, steps: int = 4, seed: int = 0) -> list[float]:
    """Train it to shift its input; the losses."""
    generator, losses = torch.Generator().manual_seed(seed), []
    optimizer = torch.optim.AdamW(parameter_groups(model, 2e-3, scale_lr=1e-2))
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(256, 64, generator=generator).to(dtype)
        loss = (model(x) - x.roll(1, 1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Two matrices of sizes that blocks do not divide, with biases that stay in fp32."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 130), nn.GELU(), nn.Linear(130, 64)).to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(dtype)
    return (model(x) - x.roll(1, 1).tanh()).float().square().mean()


def train(model: nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> float:
    """The loss of the last step."""
    value = 0.0
    for step in steps:
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        value = loss.item()
    return value


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]
