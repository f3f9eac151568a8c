"""PACT: activations that are clipped at a learned value (Choi et al., arXiv 1805.06085).

    x_hat = round(clamp(x, 0, a) (2^b - 1) / a) a / (2^b - 1),   dx_hat/da = 1 where x clips, 0 elsewhere

and the loss has a penalty on a^2 (section 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..quantizers.learned import LearnedStep
from .lsq import LSQ


def pact(weight_bits: int = 4, activation_bits: int = 4, **options: Any) -> LSQ:
    """`lsq` with the gradient of PACT for activations, and weights whose scales are chosen anew in each step. Inputs
    with negative values are clipped on both sides. A clip that nothing exceeds has no gradient: it starts from least
    squared error, not from the largest value.

    Args:
        weight_bits, activation_bits, options: of `lsq`.
    """
    return LSQ(weight_bits, activation_bits, **{"weights": "chosen", "activations": "clip", **options})


def clip_penalty(model: nn.Module) -> Tensor:
    """sum a^2 over the layers, differentiable, to be added to the loss with a factor: 1e-4 to 1e-3 of weight decay's
    order (the paper gives a the penalty of the weights).

    Raises:
        ValueError: no layer of the model clips its input at a learned value.
    """
    clips = [m for m in model.modules() if isinstance(m, LearnedStep) and not m.through_rounding]
    if not clips:
        raise ValueError("clip_penalty: no layer of the model is prepared by pact()")
    return torch.stack([clip.largest().square().sum() for clip in clips]).sum()
