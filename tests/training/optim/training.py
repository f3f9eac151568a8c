"""A small model that the tests of optimizers train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qtorch.training import optim

QUANTIZED = {
    name: getattr(optim, name) for name in ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8")
}
ALL = {**QUANTIZED, "_AdamW": optim._AdamW}

Make = Callable[[Any], torch.optim.Optimizer]


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
