"""Running a model on batches of data to observe it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn


@torch.no_grad()
def run_batches(
    model: nn.Module, batches: Iterable[Any], forward: Callable[[nn.Module, Any], Any] | None = None
) -> int:
    """Run `model` in eval mode, without gradients, on each batch; then restore the mode of each module.

    Args:
        batches: a mapping is passed as keyword arguments, a tuple or list as arguments, others as the only argument.
        forward: called as ``forward(model, batch)`` instead of the model.

    Returns:
        The number of batches.

    Raises:
        ValueError: there is no batch.
    """
    training = [(module, module.training) for module in model.modules()]
    count = 0
    model.eval()
    try:
        for count, batch in enumerate(batches, 1):  # noqa: B007
            if forward is not None:
                forward(model, batch)
            elif isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, tuple | list):
                model(*batch)
            else:
                model(batch)
    finally:
        for module, mode in training:
            module.training = mode
    if not count:
        raise ValueError("calibrate: there is no batch; calibration needs at least one batch")
    return count
