"""`torch.cat` and `torch.stack` of quantized tensors: codes and scales one after the other, or an error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import implements_aten
from .joining import join
from .ops import same_scales

aten = torch.ops.aten

ACTIVATION = ("act_scale", "act_zero_point")


@implements_aten(aten.cat.default)
def _cat(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Tensors of one spec. Along an axis that one scale spans, that scale must be equal in all: parts of one tensor.

    Raises:
        ValueError: the tensors are quantized differently.
    """
    tensors = args[0]
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = tensors[0]
    for other in tensors:
        if type(other) is not type(first) or other.scheme.spec != first.scheme.spec:
            raise ValueError(f"cat joins tensors quantized alike, got {first!r} and {other!r}")
        if other.scheme.dtype != first.scheme.dtype:
            raise ValueError(f"cat joins tensors of one dtype, got {first.scheme.dtype} and {other.scheme.dtype}")
    of_activation = [name for name in ACTIVATION if getattr(first, name, None) is not None]
    if not all(torch.equal(getattr(t, name), getattr(first, name)) for t in tensors for name in of_activation):
        raise ValueError("cat cannot join weights with static activation scales, which differ; dequantize() them first")
    axis %= len(first.scheme.shape)
    codes = torch.cat([tensor.plain()[0] for tensor in tensors], axis)
    if first.scheme.weight.granularity.pattern(len(first.scheme.shape))[axis] == -1:
        if all(same_scales(first, other) for other in tensors):
            result: Tensor = first.with_plain((codes, *first.scales()))
            return result
        raise ValueError(f"cat along axis {axis}: one scale spans the axis ({first.scheme.weight}); dequantize() first")
    scales, zero_points = zip(*[tensor.scales() for tensor in tensors], strict=True)
    zero_point = None if zero_points[0] is None else torch.cat(zero_points, axis)
    result = first.with_plain((codes, torch.cat(scales, axis), zero_point))
    return result


@implements_aten(aten.stack.default)
def _stack(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Matrices of one spec along a new first axis.

    Raises:
        ValueError: the tensors are quantized differently, or have another shape than matrices.
    """
    tensors, axis = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if axis != 0 or any(tensor.dim() != 2 for tensor in tensors):
        raise ValueError(f"stack joins quantized matrices along axis 0, got {tensors[0]!r} and axis {axis}")
    return join([[tensor] for tensor in tensors])
