"""What autocast means for products: it casts the input and the bias, and nothing inside a kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocasts(device: str) -> bool:
    """Whether inputs on this type of device are cast for products."""
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context in which inputs on this type of device are not cast."""
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def cast_for_product(
    product: Callable[..., Tensor], input: Tensor, weight: Any, bias: Tensor | None, *arguments: Any
) -> Tensor:
    """`product(input, weight, bias, *arguments)`. Under autocast, input and bias are cast, the weight is not, and the
    product runs without autocast: what it computes in fp32, such as the exact sum of integers, stays in fp32."""
    device = input.device.type
    if not autocasts(device):
        return product(input, weight, bias, *arguments)
    input = input.to(torch.get_autocast_dtype(device))
    bias = None if bias is None else bias.to(input.dtype)
    with torch.autocast(device, enabled=False):
        return product(input, weight, bias, *arguments)
