"""A weight update rounded stochastically, in place: training without a copy of the weight in higher precision.

bf16:   w <- round(w + a u)                 to one of the two neighbours in bf16, unbiased
int8:   w <- quantize(q s + a u)            by rows: s = max(max_k |q s + a u| / 127, tiny), q stochastic

On CUDA it is one pass (`cuda/shared_ops.py`). Random numbers come from torch's default generator of the device,
which a CUDA graph advances on each replay.
"""

import torch
from torch import Tensor

from ...primitives import Rounding, affine, round_to_integer
from ..custom_ops import by_device


@torch.no_grad()
def stochastic_update_bf16_(weight: Tensor, update: Tensor, alpha: float) -> Tensor:
    """weight (M, K) bf16 += alpha * update (M, K), rounded stochastically, in place; `alpha` is minus the learning
    rate.

    Raises:
        ValueError: other dtypes or shapes.
    """
    if weight.dtype != torch.bfloat16 or weight.shape != update.shape or weight.dim() != 2:
        raise ValueError(
            f"stochastic_update_bf16_ takes a bf16 matrix and an update of its shape, got {tuple(weight.shape)} of "
            f"{weight.dtype} and {tuple(update.shape)}"
        )
    update_bf16(weight, update, alpha)
    return weight


@by_device
def update_bf16(weight: Tensor, update: Tensor, alpha: float) -> None:
    """`stochastic_update_bf16_` of arguments that are checked already."""
    value = weight.float() + alpha * update.float()
    bits = value.view(torch.int32)
    noise = torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    # Infinity and NaN are not rounded.
    weight.copy_(torch.where(value.isfinite(), ((bits + noise) & -65536).view(torch.float32), value))


@torch.no_grad()
def stochastic_update_int8_(codes: Tensor, scale: Tensor, update: Tensor, alpha: float) -> None:
    """codes (M, K) int8 * scale (M, 1) fp32 += alpha * update (M, K), in place, with a new scale for each row and codes
    rounded stochastically.

    Raises:
        ValueError: other dtypes or shapes.
    """
    if codes.dtype != torch.int8 or codes.shape != update.shape or scale.shape != (*codes.shape[:1], 1):
        raise ValueError(
            f"stochastic_update_int8_ takes int8 codes (M, K), scales (M, 1) and an update (M, K), got "
            f"{tuple(codes.shape)} of {codes.dtype}, {tuple(scale.shape)} and {tuple(update.shape)}"
        )
    if codes.numel():
        update_int8(codes, scale, update, alpha)


@by_device
def update_int8(codes: Tensor, scale: Tensor, update: Tensor, alpha: float) -> None:
    """`stochastic_update_int8_` of arguments that are checked already."""
    value = codes.float() * scale + alpha * update.float()
    new = affine.quotient(value.abs().amax(1, keepdim=True), 127.0).clamp(min=torch.finfo(torch.float32).tiny)
    codes.copy_(round_to_integer(value * (1.0 / new), Rounding.STOCHASTIC).clamp(-127, 127))
    scale.copy_(new)
