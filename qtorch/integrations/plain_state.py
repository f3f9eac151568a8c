"""The plain tensors that stand for a state dict with quantized weights, as folders of other packages store them."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..checkpoint.formats.transformers_folder import stored
from ..dtypes import QuantizedTensor, serialize
from ..training.weights.master import MasterWeight


def plain_state(
    state: Mapping[str, Any],
    entries: dict[str, serialize.Entry],
    parts_of: Callable[[str, QuantizedTensor], tuple[dict[str, Tensor], serialize.Entry]] = stored,
) -> dict[str, Tensor]:
    """The plain tensors that stand for a state dict; `entries` gets those of the quantized ones. A weight in training
    that holds floats is stored as floats. Parts that lie in the memory of an earlier one, as those of weights that were
    one, are copied: packages refuse to write them, or leave them out."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        if isinstance(tensor, QuantizedTensor) and not isinstance(tensor, MasterWeight):
            tensors, entries[name] = parts_of(name, tensor)
            for key, value in tensors.items():
                memory = value.untyped_storage().data_ptr()
                found[key] = value.detach().clone() if memory in seen else value.detach().contiguous()
                seen.add(memory)
        else:
            found[name] = (tensor.floats() if isinstance(tensor, MasterWeight) else tensor).detach()
    return found
