"""Loading a checkpoint: all of it is checked before the model changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from pathlib import Path

import torch
from torch import Tensor, nn

from ..dtypes import QuantizedTensor
from ..model.install import Change, check_model, install, keep_attributes, tell
from ..model.module_repr import show_quantized
from ..primitives.tracing import plain_name
from .header import check_fits, check_names, check_shape
from .sources import open_source
from .stacked_experts import fuse_experts
from .tensor_file import Place, places_of


def load_quantized(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    verify: bool = True,
    mmap: bool = False,
) -> nn.Module:
    """Load a checkpoint into `model`, which may be on the meta device or quantized already.

    The checkpoint is a file of `save_quantized`, a folder of transformers, or a checkpoint of another package
    (`qtorch.checkpoint.formats`), whose weights stay packed.

    Everything is read and checked before the first weight is replaced, and all are replaced in one step. A concurrent
    save to the same path is never mixed with the checkpoint that is loaded. Float parameters keep `requires_grad` of
    the model, quantized ones are frozen; attributes of the parameters of the model are kept.

    Args:
        device: device of the loaded weights; by default that of the weight replaced, the CPU for the meta device.
        verify: compare every tensor with its checksum.
        mmap: map tensors that are not moved or unpacked, so that they are read from the file when used. Writing to or
            truncating the file while the model is in use would change its weights or kill the process.
            (`save_quantized` replaces an existing file, it does not write to it.)

    Returns:
        `model`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is truncated, corrupted, of another version or an unknown format, cannot be represented
            exactly, or does not fit the model, which is unchanged.
        TypeError: `model` is not a module.
    """
    check_model("load_quantized", model)
    path = Path(path)
    places = dict(places_of(model))
    with open_source(path, verify=verify, mmap=mmap) as opened:
        source = fuse_experts(opened, places)
        aliases = {**_shared(places, source.names), **source.aliases}
        # Earlier versions wrote the names of compiled models as torch.compile changes them.
        aliases = {plain_name(name): aliases.get(name, name) for name in source.names | aliases.keys()}
        absent = {name for name in source.optional() if name not in places}
        check_names(path, places, aliases.keys() - absent, source.note)
        loaded: dict[str, Tensor] = {}
        changes: list[Change] = []
        for name, place in places.items():
            module, attribute, old = place
            stored = aliases.get(name, name)  # a name that the file lacks stays one
            if stored not in source.names:
                continue
            if stored not in loaded:
                check_shape(path, name, place, tuple(source.contents(stored).shape))  # before its memory is asked for
                loaded[stored] = source.tensor(stored)
                check_fits(path, name, place, loaded[stored])
                loaded[stored] = loaded[stored].to(device or ("cpu" if old.is_meta else old.device))
            tensor = loaded[stored]
            check_fits(path, name, place, tensor)
            if not isinstance(old, nn.Parameter):
                buffer = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
                changes.append(Change(module._buffers, attribute, keep_attributes(buffer, old)))
                continue
            if not isinstance(tensor, nn.Parameter):
                frozen = isinstance(tensor, QuantizedTensor) or not (tensor.is_floating_point() or tensor.is_complex())
                loaded[stored] = tensor = nn.Parameter(tensor, old.requires_grad and not frozen)
            changes.append(Change(module._parameters, attribute, keep_attributes(tensor, old)))
    install(changes)
    for module in model.modules():
        show_quantized(module)
    tell(model)
    return model


def _shared(places: Mapping[str, Place], names: Set[str]) -> dict[str, str]:
    """Names that the file lacks, because their parameter has another name in the model, which the file has:
    transformers writes a tied parameter once."""
    found = {id(places[name][2]): name for name in sorted(names & places.keys())}
    missing = [(name, id(tensor)) for name, (_, _, tensor) in places.items() if name not in names]
    return {name: found[key] for name, key in missing if key in found}
