"""The fast path of layers: from its second call on, a layer calls the compiled kernel directly.

`F.linear` with a quantized weight looks up the kernel, checks shapes, dtypes, devices and the memory of the weight, and
handles autocast, torch.func, tracers and open records of kernels. For a small layer that takes longer than the product.
So a kernel that can be called again with pointers alone sets a function on the weight:

    weight.fast_linear(input, weight, bias)  ->  the result, or None if this call needs the full path

The function checks what may change between calls: the dtype, width and device of the input, the bias, and whether the
inner tensors were moved or written to. `fast_linear_of` returns it unless another mechanism takes part in the call. It
is neither copied nor saved. The product with experts has ``weight.fast_grouped(input, weight, experts)``, a convolution
``weight.fast_conv(input, weight, bias, stride, padding, dilation, groups)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..kernels.custom_ops import recording
from .outside_dispatch import dispatches

FastLinear = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]
FastGrouped = Callable[[Tensor, Tensor, Tensor], Tensor | None]
FastConv = Callable[[Tensor, Tensor, Tensor | None, Any, Any, Any, int], Tensor | None]

_functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def fast_linear_of(input: Any, weight: Any) -> FastLinear | None:
    """The function that the last kernel set on `weight`, or None if this call needs the full path.

    For eager mode only: a compiler traces the full path.
    """
    fast_linear: FastLinear | None = getattr(weight, "fast_linear", None)
    return None if fast_linear is None or _others_take_part(input) else fast_linear


def fast_grouped_of(input: Any, weight: Any) -> FastGrouped | None:
    """The same for the product with experts."""
    fast_grouped: FastGrouped | None = getattr(weight, "fast_grouped", None)
    return None if fast_grouped is None or _others_take_part(input) else fast_grouped


def fast_conv_of(input: Any, weight: Any) -> FastConv | None:
    """The same for a convolution."""
    fast_conv: FastConv | None = getattr(weight, "fast_conv", None)
    return None if fast_conv is None or _others_take_part(input) else fast_conv


def _others_take_part(input: Any) -> bool:
    return bool(
        type(input) is not Tensor
        or input.is_neg()
        or _functorch_is_active()
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
        or recording()
        or dispatches
        or torch._C._get_tracing_state()
    )
