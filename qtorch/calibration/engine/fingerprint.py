"""Fingerprints: short texts that differ when the weights of a model, or the data, do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ...checkpoint.tensor_file import checksum, places_of
from ...dtypes import QuantizedTensor
from ..data import Data


def of_json(data: Any) -> str:
    """The fingerprint of JSON data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def of_weights(model: nn.Module) -> str:
    """The fingerprint of all parameters and buffers, and of the class of the model."""
    tensors = {name: _of_tensor(tensor) for name, (_, _, tensor) in places_of(model)}
    return of_json([type(model).__qualname__, tensors])


def of_data(data: Data) -> str:
    """The fingerprint of batches, and of the names of the functions that use them."""
    functions = [f"{f.__module__}.{f.__qualname__}" if hasattr(f, "__qualname__") else type(f).__qualname__
                 for f in (data.forward, data.mask) if f is not None]  # fmt: skip
    batches = []
    for batch in data.batches:
        leaves, spec = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        batches.append([str(spec), [_of_leaf(leaf) for leaf in leaves]])
    return of_json([functions, batches])


def _of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return ["tensor", _of_tensor(leaf)]
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    if type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype"):
        return ["array", _of_tensor(torch.as_tensor(leaf, device="cpu"))]
    raise ValueError(
        f"resume: a batch holds a {type(leaf).__name__}, which has no fingerprint; give batches of tensors, "
        "numbers and text, or calibrate without resume="
    )


def _of_tensor(tensor: Tensor) -> Any:
    if isinstance(tensor, QuantizedTensor):
        return [repr(tensor.scheme), {name: _of_tensor(inner) for name, inner in tensor.inner_tensors.items()}]
    if tensor.is_meta or nn.parameter.is_lazy(tensor):
        return "no values"
    return checksum(tensor.detach().cpu())
