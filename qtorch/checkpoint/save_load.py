"""Saving and loading a checkpoint; all of it is checked before the model changes."""

import os
import re
import secrets
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import QuantizedTensor, serialize
from ..model import module_repr, weight_kinds
from ..model.install import Change, check_model, install, keep_attributes, tell
from ..primitives.tracing import plain_name
from . import sources, stacked_experts
from .header import Header, all_shards, check_fits, check_names, check_shape, shard_paths
from .save_folder import alone_in, check_converted, save_folder, temporary_beside, with_first_names, write_file
from .tensor_file import OWN_FORMAT, Place, checksum, places_of


def save_quantized(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    format: str = OWN_FORMAT,
    max_shard_size: int = 5 * 2**30,
) -> None:
    """Save a model, or a state dict, with its quantized weights.

    Buffers of a model that are not part of its state dict are saved too, so that a model built on the meta device can
    be loaded completely. Tied weights are saved once. Of several that save to a path at a time, the last one wins.

    Args:
        path: name of the file, such as ``model.safetensors``; of a folder for the formats of other packages.
        format: ``"qtorch"``, which keeps everything; or a format of another package, which refuses what it cannot hold:
            ``"compressed-tensors"``, a folder that vLLM serves (see docs/guides/vllm.md); ``"gguf"``, a file that
            llama.cpp runs (see `save_gguf`).
        max_shard_size: maximum size of a file in bytes, unless one tensor is larger.

    Raises:
        ValueError: a value is not a tensor with data, has a dtype that safetensors lacks, or two names clash; a layer
            or a weight is in training, and the file would not say so; `path` is a name for files of `torch.save`.
        OSError: the files cannot be written; those of an earlier save are unchanged.
    """
    if not isinstance(model_or_state_dict, nn.Module | Mapping):
        check_model("save_quantized", model_or_state_dict)
    if format != OWN_FORMAT:
        save_folder(model_or_state_dict, path, format, max_shard_size=max_shard_size)
        return
    path = Path(path)
    if path.suffix in sources.PICKLES:
        raise ValueError(f"save_quantized: {path.name} is a name of files of torch.save; write {path.stem}.safetensors")
    if path.is_dir():
        raise IsADirectoryError(f"save_quantized: {path} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"save_quantized: there is no folder {path.parent}")
    tensors, header = _canonical(_named_tensors(model_or_state_dict))
    root, *shards = _split(tensors, max_shard_size)
    names = [shard.name for shard in shard_paths(path, secrets.token_hex(4), len(shards))]
    header.shards = {name: list(shard) for name, shard in zip(names, shards, strict=True)}
    header.checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    with temporary_beside(path) as folder:
        for name, shard in zip(names, shards, strict=True):
            write_file(folder / name, shard, {})
        write_file(folder / path.name, root, header.to_metadata())
        with alone_in(path.parent):
            for name in [*names, path.name]:
                os.replace(folder / name, path.with_name(name))
            for stale in all_shards(path):
                if stale.name not in names:
                    stale.unlink(missing_ok=True)


def _named_tensors(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(source, nn.Module):
        return {plain_name(name): tensor for name, tensor in source.items()}
    check_converted(source, keeps_state=True)
    for name, module in source.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(f"save_quantized: {name or 'the model'} has extra state, which safetensors cannot hold")
    places = dict(places_of(source))
    for name, (module, attribute, tensor) in places.items():
        held = weight_kinds.kind_of(module, attribute).held
        if held is not None and isinstance(tensor, QuantizedTensor) and tensor.trains:
            # It has the axes of the parameter, the weight that serves those of a matrix.
            raise ValueError(f"save_quantized: {name} is in training: quantize_(model, convert()), or torch.save it")
    return {name: tensor for name, (_, _, tensor) in places.items()}


def _canonical(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Header]:
    """All tensors to store, by stored name, and the header."""
    tensors: dict[str, Tensor] = {}
    header = Header()
    for name, tensor, original in with_first_names(named):
        if original != name:
            header.aliases[name] = original
            continue
        if isinstance(tensor, QuantizedTensor):
            stored, header.quantized[name] = serialize.to_canonical(name, tensor)
        else:
            stored = {name: tensor.resolve_conj().resolve_neg()}
            header.plain.append(name)
        if clash := stored.keys() & tensors.keys():
            raise ValueError(f"save_quantized: two tensors would be stored as {', '.join(clash)}")
        tensors |= {key: value.detach().cpu().contiguous() for key, value in stored.items()}
    return tensors, header


def _split(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


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
    with sources.open_source(path, verify=verify, mmap=mmap) as opened:
        source = stacked_experts.fuse_experts(opened, places)
        aliases = {**_shared(places, source.names), **source.aliases}
        # Earlier versions wrote the names of compiled models as torch.compile changes them.
        aliases = {plain_name(name): aliases.get(name, name) for name in source.names | aliases.keys()}
        absent = {name for name in source.optional() if name not in places}
        unsaved = getattr(model, "_keys_to_ignore_on_save", None) or ()  # of transformers: tables that it computes
        constant = {n for n, (*_, t) in places.items() if any(re.search(key, n) for key in unsaved) and not t.is_meta}
        check_names(path, places, (aliases.keys() - absent) | constant, source.note)
        loaded: dict[str, Tensor] = {}
        rows: dict[tuple[nn.Module, str], list[Tensor]] = {}  # of layers that `fuse_projections` has joined
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
            if attribute in module._buffers:
                buffer = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
                changes.append(Change(module._buffers, attribute, keep_attributes(buffer, old)))
                continue
            whole: Any = module._parameters[attribute]
            if whole is not old:
                parts = rows.setdefault((module, attribute), [])
                parts.append(tensor)
                if sum(map(len, parts)) < len(whole):
                    continue
                stored, tensor = f"rows of {name}", torch.cat(parts)
            if not isinstance(tensor, nn.Parameter):
                frozen = isinstance(tensor, QuantizedTensor) or not (tensor.is_floating_point() or tensor.is_complex())
                loaded[stored] = tensor = nn.Parameter(tensor, old.requires_grad and not frozen)
            changes.append(Change(module._parameters, attribute, keep_attributes(tensor, whole)))
    install(changes)
    for module in model.modules():
        module_repr.show_quantized(module)
    tell(model)
    return model


def _shared(places: Mapping[str, Place], names: Set[str]) -> dict[str, str]:
    """Names that the file lacks, because their parameter has another name in the model, which the file has:
    transformers writes a tied parameter once."""
    found = {id(places[name][2]): name for name in sorted(names & places.keys())}
    missing = [(name, id(tensor)) for name, (_, _, tensor) in places.items() if name not in names]
    return {name: found[key] for name, key in missing if key in found}
