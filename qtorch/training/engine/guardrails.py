"""Warnings, each given once, about training that runs but is unlikely to learn well or be fast."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .spec import GemmSpec

FEW_TOKENS = 256
"""Tokens below which the rounding of an INT8 gradient is not averaged out: its noise falls as their square root."""

LOST_SHARE = 0.5
"""Share of a weight's updates that may vanish in rounding before there is a warning."""

_given: set[str] = set()


def warn_once(topic: str, message: str) -> None:
    """Warn, unless there was a warning on the same topic before."""
    if topic not in _given:
        _given.add(topic)
        warnings.warn(f"qtorch: {message}", stacklevel=3)


def warn_of_few_tokens(tokens: int, grad_weight: GemmSpec) -> None:
    """Warn if the gradient of a weight, a sum over tokens, has too few of them to average out the rounding noise."""
    lhs = grad_weight.lhs
    if lhs is not None and not lhs.dtype.is_floating_point and tokens < FEW_TOKENS:
        warn_once(
            "few tokens",
            f"{lhs.dtype} gradients of weights from {tokens} tokens a batch: fewer than {FEW_TOKENS} average little of "
            "the rounding noise, and are too few to be fast; leave grad_weight in full precision, or enlarge the batch",
        )


def warn_of_lost_updates(before: Tensor, after: Tensor, wanted: Tensor) -> None:
    """Warn if rounding `wanted` (fp32) to the 16 bits of `before` loses many updates; `after` is the rounded weight."""
    moved = wanted != before.float()
    count = int(moved.sum())
    lost = int((moved & (after == before)).sum())
    if count and lost > LOST_SHARE * count:
        warn_once(
            "lost updates",
            f"{lost / count:.0%} of an update of a {str(before.dtype).removeprefix('torch.')} weight of shape "
            f"{tuple(before.shape)} vanish in rounding: they are below half a unit in the last place of the weight. "
            "Keep the weights in fp32 (and use autocast), or use int8_weight_only_quantized_training(), which rounds "
            "stochastically",
        )


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether small updates vanish in weights of this dtype."""
    return dtype in (torch.bfloat16, torch.float16)
