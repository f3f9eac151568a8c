"""What becomes of a quantized weight when adapters are merged into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from ...dtypes import QuantizedTensor
from ...install import keep_attributes

_REQUANTIZES: ContextVar[bool] = ContextVar("requantizes", default=False)


@contextmanager
def requantize_merged() -> Iterator[None]:
    """Context in which PEFT's merges quantize the merged weights again, each as it was quantized before.

        with requantize_merged():
            model = peft_model.merge_and_unload()

    Without it, merged weights are plain float parameters of the weight's dtype, so that the merged model computes what
    the adapter computed. With it they take as little memory as before, and differ from base plus adapter by one more
    rounding to codes. `unmerge_adapter` gives the codes of the base back in both cases.
    """
    token = _REQUANTIZES.set(True)
    try:
        yield
    finally:
        _REQUANTIZES.reset(token)


def merged_weight(base: QuantizedTensor, values: Tensor) -> nn.Parameter:
    """The parameter that replaces `base` after a merge.

    Args:
        values: base plus adapters, in fp32.

    Raises:
        ValueError: `values` has NaN or infinities, which no code represents, and is to be quantized.
    """
    if not _REQUANTIZES.get():
        merged = nn.Parameter(values.detach().to(base.scheme.dtype), requires_grad=False)
        return keep_attributes(merged, base)
    return requantized(base, values)


@torch.no_grad()
def requantized(base: QuantizedTensor, values: Tensor) -> nn.Parameter:
    """A frozen parameter with `values`, quantized as `base` is.

    Raises:
        ValueError: `values` has NaN or infinities, which no code represents.
    """
    if not bool(values.isfinite().all()):
        raise ValueError(
            "NaN or infinite values in the merged weights, which no code represents: the adapter seems to be broken; "
            "the base weight is unchanged"
        )
    return keep_attributes(nn.Parameter(base.quantized_like(values.detach()), requires_grad=False), base)
