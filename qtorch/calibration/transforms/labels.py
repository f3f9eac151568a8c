"""Labels: by which of the unknown scales s_1 .. s_n each element of a tensor is multiplied.

A label i stands for a factor s_i, -i for 1 / s_i, and 0 for 1. Labels are int32 tensors that broadcast to the shape of
the tensor: an axis along which all labels are equal has size 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def compact(labels: Tensor) -> Tensor:
    """The same labels with size 1 along each axis that they do not depend on."""
    for axis in range(labels.dim()):
        first = labels.narrow(axis, 0, 1) if labels.shape[axis] else labels
        if labels.shape[axis] > 1 and (labels.stride(axis) == 0 or bool((labels == first).all())):
            labels = first
    return labels.contiguous()


def axis_labels(shape: Sequence[int], axis: int) -> Tensor:
    """Labels 1, 2, ... along one axis."""
    sizes = [1] * len(shape)
    sizes[axis] = shape[axis]
    return torch.arange(1, shape[axis] + 1, dtype=torch.int32, device="cpu").reshape(sizes)


def aligned(labels: Tensor, dim: int) -> Tensor | None:
    """Labels with `dim` axes, as broadcasting aligns them; None if axes that are left out have several labels."""
    while labels.dim() > dim:
        if labels.shape[0] != 1:
            return None
        labels = labels.squeeze(0)
    return labels.reshape((1,) * (dim - labels.dim()) + tuple(labels.shape))


def ids(labels: Tensor) -> set[int]:
    """The scales that occur."""
    return set(labels.abs().unique().tolist()) - {0}


def factors(labels: Tensor, scales: Tensor) -> Tensor:
    """What elements with these labels are multiplied by.

    Args:
        labels: any shape.
        scales: (n,), s_1 .. s_n.
    """
    padded = torch.cat([scales.new_ones(1), scales])
    found = padded[labels.abs().long().to(scales.device)]
    return torch.where(labels.to(scales.device) < 0, 1 / found, found)
