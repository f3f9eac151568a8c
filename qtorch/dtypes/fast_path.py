"""The fast path of `F.linear`: from the second call of a layer on, straight to the compiled kernel.

`F.linear` with a quantized weight asks which kernel runs, checks shapes, dtypes, devices and the memory of the weight,
and may have to do with autocast, torch.func, a tracer or an open record of kernels. For a small layer that takes longer
than the product. So a kernel that can be called again with nothing but pointers leaves a function on the weight:

    weight.fast_linear(input, weight, bias)  ->  the result, or None where this call takes more than the kernel's call

The function checks what may change from call to call: the input's dtype, width and device, the bias, and that the
tensors of the weight lie where they lay and were not written to. `fast_linear_of` gives it where no other mechanism
takes part in the call. It is neither copied nor saved.
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

_functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def fast_linear_of(input: Any, weight: Any) -> FastLinear | None:
    """What the kernel of the last call has left on `weight`, or None where this call has to go the whole way.

    In eager mode only: a compiler that traces takes the whole way.
    """
    fast_linear: FastLinear | None = getattr(weight, "fast_linear", None)
    if (
        fast_linear is None
        or type(input) is not Tensor
        or _functorch_is_active()
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
        or recording()
        or dispatches
        or torch._C._get_tracing_state()
    ):
        return None
    return fast_linear
