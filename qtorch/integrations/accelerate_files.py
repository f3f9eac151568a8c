"""accelerate's safetensors files, as `Accelerator.save_state` and `save_model` write them, with quantized weights.

A quantized weight is written as its parts, and the metadata of the file say how it is quantized, as in a folder of
transformers; a weight in training that holds floats is written as floats. accelerate has no hook for that. So importing
this module, which happens right after accelerate is imported, puts one step around its function that writes a file and
around the two that read one. What has no quantized weights passes through.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import accelerate.checkpointing as checkpointing
import accelerate.utils.modeling as modeling
import accelerate.utils.other as other
from safetensors.torch import load_file
from torch import Tensor, nn

from ..checkpoint.formats.transformers_folder import Index, stored
from ..checkpoint.formats.transformers_folder.names import is_marker
from ..checkpoint.formats.transformers_folder.source import TransformersFolder
from ..checkpoint.hf_folder import HFFolder
from ..dtypes import QuantizedTensor
from ..dtypes.serialize import Entry
from ..training.weights.codes import CodesWeight
from ..training.weights.master import MasterWeight
from .wrappers import around


def _joined(state: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file holds, with quantized tensors in place of their parts."""
    if not any(isinstance(tensor, Tensor) and is_marker(tensor.shape) for tensor in state.values()):
        return state
    source = TransformersFolder(HFFolder(Path(path)), mmap=False)
    with source:
        for name, entry in source.index.quantized.items():
            marker = state.pop(name, None)
            for key in entry["tensors"].values():
                state.pop(key, None)
            if marker is not None:
                state[name] = source.tensor(name).to(marker.device)
    return state


def plain_state(
    state: Mapping[str, Any],
    entries: dict[str, Entry],
    parts_of: Callable[[str, QuantizedTensor], tuple[dict[str, Tensor], Entry]] = stored,
) -> dict[str, Tensor]:
    """The plain tensors that stand for a state dict; `entries` gets those of the quantized ones.

    A weight in training that holds floats is stored as floats. Parts that lie in the memory of an earlier one, as those
    of weights that were one, are copied: packages refuse to write them, or leave them out.
    """
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


@around(other, "safe_save_file")
def _save_parts(
    save: Callable[..., Any], tensors: dict[str, Tensor], filename: Any, metadata: dict[str, str] | None = None
) -> Any:
    index = Index()
    if any(isinstance(tensor, QuantizedTensor) for tensor in tensors.values()):
        tensors = plain_state(tensors, index.quantized)
    return save(tensors, filename, metadata=index.to_metadata() | (metadata or {}) if index.quantized else metadata)


@around(modeling, "load_state_dict")
def _load_joined(load: Callable[..., Any], checkpoint_file: str, *args: Any, **kwargs: Any) -> Any:
    return _joined(load(checkpoint_file, *args, **kwargs), checkpoint_file)


@around(checkpointing, "load_model")
def _load_quantized(
    load: Callable[..., Any],
    model: nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int = "cpu",
    **more: Any,
) -> Any:
    own = model.state_dict(keep_vars=True)
    if not any(isinstance(tensor, QuantizedTensor) for tensor in own.values()):
        return load(model, filename, strict=strict, device=device, **more)
    state = _joined(load_file(filename, device=device), filename)
    for name, tensor in own.items():
        if isinstance(tensor, CodesWeight) and isinstance(state.get(name), QuantizedTensor):
            state[name] = CodesWeight(state[name].inner_tensors, state[name].scheme)
    # Of tied weights one is stored.
    stored = {id(own[name]): tensor for name, tensor in state.items() if name in own}
    state |= {name: stored[id(of)] for name, of in own.items() if name not in state and id(of) in stored}
    return model.load_state_dict(state, strict=strict)
