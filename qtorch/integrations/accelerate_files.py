"""accelerate's safetensors files, as `Accelerator.save_state` and `save_model` write them, with quantized weights.

A quantized weight is written as its parts, and the metadata of the file say how it is quantized, as in a folder of
transformers; a weight in training that holds floats is written as floats. accelerate has no hook for that. So importing
this module, which happens right after accelerate is imported, puts one step around its function that writes a file and
around the two that read one. What has no quantized weights passes through.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.checkpointing as checkpointing
import accelerate.utils.modeling as modeling
import accelerate.utils.other as other
from safetensors.torch import load_file
from torch import Tensor, nn

from ..checkpoint.formats.transformers_folder import Index, TransformersFolder, is_marker
from ..checkpoint.hf_folder import HFFolder
from ..dtypes import QuantizedTensor
from ..training.weights.codes import CodesWeight
from .plain_state import plain_state
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
