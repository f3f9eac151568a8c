"""Weight updates rounded stochastically on CUDA, by Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import features
from ..custom_ops import implement, note

_HAS_TRITON = features.cuda_lacks("triton") is None


def random_seed(device: torch.device) -> Tensor:
    """A seed for Philox, drawn on the device: int64 (1,)."""
    return torch.randint(1 << 62, (1,), device=device)


@implement("update_bf16", "cuda", where=_HAS_TRITON)
def triton_update_bf16(weight: Tensor, update: Tensor, alpha: float) -> None:
    """See `stochastic_update_bf16_`."""
    from .triton.stochastic_update import update_bf16

    note("stochastic_update_bf16_.triton")
    update_bf16(weight, update, alpha, random_seed(weight.device))


@implement("update_int8", "cuda", where=_HAS_TRITON)
def triton_update_int8(codes: Tensor, scale: Tensor, update: Tensor, alpha: float) -> None:
    """See `stochastic_update_int8_`."""
    from .triton.stochastic_update import update_int8

    note("stochastic_update_int8_.triton")
    update_int8(codes, scale, update, alpha, random_seed(codes.device))
