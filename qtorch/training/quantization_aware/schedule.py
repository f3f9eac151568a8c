"""Schedule: from which step on a layer in training is fake-quantized, and from which on its scales stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ...prepared_module import QuantizationState


class Schedule(QuantizationState):
    """Counts the forward passes of its layer in training mode, in a buffer: a compiled graph does not change with it.

    In eval mode the layer computes what the converted layer would, whatever the step. Passes that are run again for
    checkpointed activations count again, and so does each batch of several whose gradients are added up.

    Args:
        start_step: passes in floating point before fake quantization begins.
        freeze_step: passes after which scales and observed ranges are held; None for never.

    Raises:
        ValueError: a step below zero, or scales that freeze before they are used.
    """

    step: Tensor

    def __init__(self, start_step: int = 0, freeze_step: int | None = None) -> None:
        super().__init__()
        check_steps(start_step, freeze_step)
        self.start_step, self.freeze_step = start_step, freeze_step
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    @property
    def active(self) -> Tensor:
        """Whether the layer is fake-quantized."""
        return self.step >= self.start_step

    @property
    def frozen(self) -> Tensor | None:
        """Whether scales are held; None if they never are."""
        return None if self.freeze_step is None else self.step >= self.freeze_step

    def advance(self) -> None:
        """One step is done."""
        self.step.add_(1)


def check_steps(start_step: int, freeze_step: int | None) -> None:
    """Raise `ValueError` if a step is negative, or scales freeze before they are used."""
    if start_step < 0:
        raise ValueError(f"start_step is {start_step}; it must not be negative")
    if freeze_step is not None and freeze_step <= start_step:
        raise ValueError(f"freeze_step is {freeze_step}, start_step {start_step}: scales would never be in use")
