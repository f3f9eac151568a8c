"""Verification: a model before and after a change of its parameters gives the same outputs, within rounding.

The outputs are computed in fp32, whatever the dtype of the model: each operation takes fp32 copies of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ...statistics import Data
from ...statistics.batches import eval_mode
from .graph import tensors_of

T = TypeVar("T")

HALVES = (torch.bfloat16, torch.float16)

TOLERANCE = 1e-4
"""Largest relative difference of outputs in fp32 and fp64."""


class _InFloat32(TorchFunctionMode):
    """Operations on 16-bit floats run in fp32, and so do those that would make such tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return _widened(func(*args))
        return tree_map(_widened, func(*tree_map(_widened, args), **tree_map(_widened, kwargs or {})))


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunction():
            return value.float() if value.dtype in HALVES else value
    return torch.float32 if value in HALVES and isinstance(value, torch.dtype) else value


@torch.no_grad()
def outputs(model: nn.Module, data: Data, batch: Any) -> list[Tensor]:
    """All floating-point outputs of a model for a batch, computed in fp32 (fp64 in a model in fp64)."""
    with eval_mode(model), _InFloat32():
        return tensors_of(data.call(model, batch))


def difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest |a - b| / |a| over the outputs, in Euclidean norms; infinite where only one of both is finite."""
    largest = 0.0
    for a, b in zip(before, after, strict=True):
        finite = a.isfinite()
        if a.shape != b.shape or not torch.equal(finite, b.isfinite()):
            return float("inf")
        a, b = a[finite].double(), b[finite].double()
        largest = max(largest, float((a - b).norm() / a.norm().clamp(min=torch.finfo(torch.float32).tiny)))
    return largest


def find_wrong(items: Sequence[T], differs: Callable[[Sequence[T]], bool]) -> list[T]:
    """The items of which `differs` is true, by bisection; all of them if they are wrong only together."""
    if not items or not differs(items):
        return []
    if len(items) == 1:
        return list(items)
    half = len(items) // 2
    found = [*find_wrong(items[:half], differs), *find_wrong(items[half:], differs)]
    return found or list(items)
