"""The plain tensors that stand for a state dict with quantized weights, as folders of transformers store them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..dtypes import QuantizedTensor
from ..formats.transformers_folder import Index, stored
from ..training.weights.master import MasterWeight


def plain_state(state: Mapping[str, Any], index: Index) -> dict[str, Tensor]:
    """Plain tensors by stored name; `index` gets the entries of the quantized ones.

    A weight in training that holds floats is stored as floats.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if isinstance(tensor, QuantizedTensor) and not isinstance(tensor, MasterWeight):
            tensors, index.quantized[name] = stored(name, tensor)
            found |= {key: value.detach().contiguous() for key, value in tensors.items()}
        else:
            found[name] = (tensor.floats() if isinstance(tensor, MasterWeight) else tensor).detach()
    return found
