"""Single experts of a weight (E, N, K), kept: ``weight[e]`` is the same tensor at each call.

A loop over experts picks a matrix out of the weight for each product. Making it takes longer than the product with
one token, and what its kernel has prepared for the next call would be lost with it. So frozen weights keep the matrices
that were picked, views of the same memory, for as long as their inner tensors neither change nor move.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tracing.function_transforms import are_active
from .base import QuantizedTensor
from .dispatch import implements_function, run_below


class _Kept(NamedTuple):
    """What the matrices were picked from, and they by number."""

    tensors: tuple[Tensor, ...]
    state: tuple[Any, ...]
    scheme: Any
    by_number: dict[int, QuantizedTensor]


@implements_function(torch.Tensor.__getitem__)
def _getitem(tensor: Any, index: Any) -> Any:
    if isinstance(tensor, QuantizedTensor) and not tensor.trains and len(tensor.scheme.shape) == 3:
        single = type(index) is int or (isinstance(index, Tensor) and not index.dim() and _is_number(index))
        if single and not (torch.compiler.is_compiling() or are_active() or torch._C._get_tracing_state()):
            return _matrix(tensor, int(index))
    kind = type(tensor) if isinstance(tensor, QuantizedTensor) else QuantizedTensor
    return run_below(kind, torch.Tensor.__getitem__, (tensor, index), {})


def _is_number(index: Tensor) -> bool:
    return not isinstance(index, QuantizedTensor) and not index.is_floating_point() and index.dtype is not torch.bool


def _matrix(weight: QuantizedTensor, e: int) -> QuantizedTensor:
    own = vars(weight)
    scheme = own["scheme"]
    tensors = tuple(own[name] for name in weight.tensor_names(scheme) if own[name] is not None)
    # Tensors of inference mode have no version, and what is made in it cannot be saved for a backward.
    versions = tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)
    state = (torch.is_inference_mode_enabled(), *versions)
    kept: _Kept | None = own.get("matrices")
    if (
        kept is None
        or kept.state != state
        or kept.scheme is not scheme
        or any(a is not b for a, b in zip(kept.tensors, tensors, strict=True))
    ):
        kept = own["matrices"] = _Kept(tensors, state, scheme, {})
    matrix = kept.by_number.get(e)
    if matrix is not None:
        return matrix
    picked: QuantizedTensor = run_below(type(weight), torch.Tensor.__getitem__, (weight, e), {})
    if not _are_views(picked, tensors):
        return picked
    # By itself, not as a view that autograd tracks: the weight is frozen.
    matrix = kept.by_number[e] = type(picked)(picked.inner_tensors, picked.scheme)
    return matrix


def _are_views(picked: QuantizedTensor, tensors: tuple[Tensor, ...]) -> bool:
    """Whether the matrix has no memory of its own, which would be that of the weight once more."""
    memory = {t.untyped_storage().data_ptr() for t in tensors}
    return all(t.untyped_storage().data_ptr() in memory for t in picked.inner_tensors.values())
