"""accelerate: weights on disk, and its safetensors files with quantized weights.

accelerate's `cpu_offload`, `dispatch_model` between devices and the CPU, and `set_module_tensor_to_device` work on
quantized weights as they are. Its files on disk are NumPy arrays, which have no quantized tensors; `disk_offload` and
`dispatch_model` of this module keep a file of `save_quantized` instead, and leave the rest to accelerate.

`Accelerator.save_state` and `save_model` write a quantized weight as its parts, and the metadata of the file say how it
is quantized, as in a folder of transformers; a weight in training that holds floats is written as floats. accelerate
has no hook for that. So importing this module, which happens right after accelerate is imported, puts one step around
its function that writes a file and around the two that read one. What has no quantized weights passes through.
"""

import os
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import accelerate.checkpointing as checkpointing
import accelerate.utils.modeling as modeling
import accelerate.utils.other as other
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..checkpoint import hf_folder, save_quantized, sources
from ..checkpoint.formats.transformers_folder import Index, TransformersFolder, is_marker
from ..dtypes import QuantizedTensor
from ..model.install import check_model
from ..primitives.supported_versions import check_version
from .plain_state import plain_state
from .wrappers import around

M = TypeVar("M", bound=nn.Module)


class WeightsOnDisk(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read when it is asked for; accelerate takes it as a state dict.

    Args:
        path: a file of `save_quantized`, or any checkpoint that `load_quantized` reads. It must not be changed while
            this is in use.
        verify: compare every tensor with its checksum, each time it is read.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = False) -> None:
        self.source = sources.open_source(Path(path), verify=verify, mmap=True)
        self.stored = {name: name for name in sorted(self.source.names)} | dict(self.source.aliases)

    def __getitem__(self, name: str) -> Tensor:
        return self.source.tensor(self.stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        self.source.close()


def disk_offload(
    model: M,
    offload_dir: str | os.PathLike[str],
    execution_device: torch.device | str | int | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> M:
    """accelerate's `disk_offload` for a model with quantized weights: each layer is read from disk when it runs.

    Args:
        model: changed in place; its parameters go to the meta device.
        offload_dir: folder for the file `weights.safetensors`, which is written (an existing one is replaced) and must
            stay while the model is in use.
        execution_device: where the layers run; by default that of the first parameter.
        offload_buffers: also keep buffers on disk.
        preload_module_classes: as in accelerate.

    Returns:
        `model`.

    Raises:
        ValueError: a parameter is on the meta device: it has no data to write.
    """
    check_version("accelerate")
    from accelerate.big_modeling import add_hook_to_module, attach_align_device_hook
    from accelerate.hooks import AlignDevicesHook

    device = execution_device if execution_device is not None else next(model.parameters()).device
    weights = _write(model, offload_dir)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    given: Any = {"weights_map": weights, "preload_module_classes": preload_module_classes}
    attach_align_device_hook(model, execution_device=device, offload=True, offload_buffers=offload_buffers, **given)
    return model


def dispatch_model(
    model: M, device_map: Mapping[str, Any], *, offload_dir: str | os.PathLike[str] | None = None, **arguments: Any
) -> M:
    """accelerate's `dispatch_model`, with "disk" in `device_map` for modules with quantized weights.

    Args:
        model: changed in place.
        device_map: name of a module -> device, "cpu" or "disk".
        offload_dir: folder for the file of the weights on disk, as in `disk_offload`; needed if there are any.
        **arguments: of accelerate's `dispatch_model`, except `state_dict` and `offload_index`.

    Returns:
        `model`.

    Raises:
        ValueError: modules go to disk and there is no `offload_dir`, or a parameter is on the meta device.
    """
    check_version("accelerate")
    import accelerate

    device_map = dict(device_map)
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    if on_disk:
        if offload_dir is None:
            raise ValueError(f"dispatch_model: {', '.join(on_disk[:4])} go to disk; give a folder, offload_dir=")
        names = tuple(f"{name}." for name, device in device_map.items() if device == "cpu")
        on_cpu = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(names)}
        # Before accelerate reads its own index of files, it looks into the state dict.
        weights: Any = _write(model, offload_dir)
        arguments |= {"state_dict": ChainMap(on_cpu, weights), "offload_index": {}}
    return accelerate.dispatch_model(model, device_map, **arguments)


def _write(model: nn.Module, folder: str | os.PathLike[str]) -> WeightsOnDisk:
    check_model("disk_offload", model)
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ValueError(f"{', '.join(empty[:4])} have no data, they are on the meta device; load the model first")
    path = Path(folder) / "weights.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_quantized(model, path)
    return WeightsOnDisk(path)


def _joined(state: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file holds, with quantized tensors in place of their parts."""
    if not any(isinstance(tensor, Tensor) and is_marker(tensor.shape) for tensor in state.values()):
        return state
    source = TransformersFolder(hf_folder.HFFolder(Path(path)), mmap=False)
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
    load: Callable[..., Any], model: nn.Module, filename: str | os.PathLike[str], strict: bool = True,
    device: str | int = "cpu", **more: Any,
) -> Any:  # fmt: skip
    own = model.state_dict(keep_vars=True)
    if not any(isinstance(tensor, QuantizedTensor) for tensor in own.values()):
        return load(model, filename, strict=strict, device=device, **more)
    state = _joined(load_file(filename, device=device), filename)
    # Of tied weights one is stored.
    stored = {id(own[name]): tensor for name, tensor in state.items() if name in own}
    state |= {name: stored[id(of)] for name, of in own.items() if name not in state and id(of) in stored}
    return model.load_state_dict(state, strict=strict)
