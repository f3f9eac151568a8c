"""What of a parameter lies in this process: the parameter itself, or its shard if it is a DTensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...model.install import is_sharded


def local_of(tensor: Tensor) -> Tensor:
    """The part of a parameter, a gradient or a state that this process holds."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def like(parameter: Any, local: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """`local`, a state of the shape of the parameter's part, sharded as the parameter is.

    Args:
        shape: of the whole, if it is not the parameter's.
    """
    if not is_sharded(parameter):
        return local
    made: Tensor = type(parameter).from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape or parameter.shape),
        stride=_row_major(shape or parameter.shape),
    )
    return made


def first_element(parameter: Any) -> int:
    """The number of the first element of this process's part, in row-major order of the whole parameter."""
    if not is_sharded(parameter):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    strides = _row_major(parameter.shape)
    return sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
