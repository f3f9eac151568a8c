"""save_quantized / load_quantized: quantized models on disk, in safetensors.

The file at `path` is the root: it holds the first tensors and, in its header, everything else there is to know. Above
`max_shard_size` the other tensors are in shards beside it, which the header names. All files are written in a folder
of their own; the shards are moved into place under new names, the root last. So whenever the process dies, `path` is
either the old checkpoint, whole, or the new one; the next save removes what was left behind.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor, nn

from .dtypes import AffineQuantizedTensor
from .dtypes.serialize import from_canonical, to_canonical

FORMAT_VERSION = 1

_HEADER = "qtorch"
_HEADER_CHECKSUM = "qtorch.crc32"


def save_quantized(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    max_shard_size: int = 5 * 2**30,
) -> None:
    """Write a model, or a state dict, with its quantized weights.

    Of a model, buffers that are not part of its state dict are saved too, so that one built on the meta device can be
    filled whole. Tied weights are written once. One process at a time may save to a path.

    Args:
        path: name of the file, ``model.safetensors`` say.
        max_shard_size: bytes above which a further file is begun.

    Raises:
        ValueError: something in it is not a tensor with data, or has a dtype that safetensors lacks, or names clash.
        OSError: the files cannot be written; those of an earlier save are as they were.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"save_quantized: {path} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"save_quantized: there is no folder {path.parent}")
    tensors, header = _canonical(_named_tensors(model_or_state_dict))
    root, *shards = _split(tensors, max_shard_size)
    token = secrets.token_hex(4)
    names = [f"{_stem(path)}-{token}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    header["shards"] = {name: list(shard) for name, shard in zip(names, shards, strict=True)}
    header["checksums"] = {name: _checksum(tensor) for name, tensor in tensors.items()}
    text = json.dumps(header)
    folder = path.with_name(f".{path.name}.{token}.tmp")
    folder.mkdir()
    try:
        for name, shard in zip(names, shards, strict=True):
            _write(folder / name, shard, {})
        _write(folder / path.name, root, {_HEADER: text, _HEADER_CHECKSUM: _text_checksum(text)})
        for name in [*names, path.name]:
            os.replace(folder / name, path.with_name(name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _remove_leftovers(path, names)


def load_quantized(
    model: nn.Module, path: str | os.PathLike[str], *, device: torch.device | str | None = None, verify: bool = True
) -> nn.Module:
    """Fill `model`, on the meta device or not, quantized or not, from a file of `save_quantized`.

    Everything is read and checked before the first weight is replaced. Tensors stay memory-mapped where they are not
    moved or unpacked.

    Args:
        device: where the weights go; by default where the model's are, the CPU for the meta device.
        verify: compare every tensor with its checksum.

    Returns:
        `model`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is truncated, corrupted, of another version, or does not fit the model; it says which. The
            model is unchanged.
    """
    path = Path(path)
    with _Reader(path, verify) as reader:
        loaded = reader.read_all()
        aliases: dict[str, str] = reader.header["aliases"]
    slots = dict(_slots(model))
    _check_names(path, slots, loaded.keys() | aliases.keys())
    moved: dict[str, Tensor] = {}
    parameters: dict[str, nn.Parameter] = {}
    new: list[tuple[dict[str, Any], str, Tensor]] = []
    for name, (module, attribute, old) in slots.items():
        source = aliases.get(name, name)
        if source not in loaded:
            continue
        _check_shape(path, name, loaded[source], old)
        if source not in moved:
            moved[source] = loaded[source].to(device or ("cpu" if old.is_meta else old.device))
        tensor = moved[source]
        if not isinstance(old, nn.Parameter):
            new.append((module._buffers, attribute, tensor))
            continue
        if source not in parameters:
            frozen = isinstance(tensor, AffineQuantizedTensor) or not tensor.is_floating_point()
            parameters[source] = nn.Parameter(tensor, old.requires_grad and not frozen)
        new.append((module._parameters, attribute, parameters[source]))
    for table, attribute, tensor in new:
        table[attribute] = tensor
    return model


class _Reader:
    """The root file and its shards, open, with the header parsed and the list of tensors checked."""

    def __init__(self, path: Path, verify: bool) -> None:
        self.path = path
        self.verify = verify
        self.files: dict[str, Any] = {}
        root = self._open(path)
        metadata = root.metadata() or {}
        if _HEADER not in metadata:
            raise ValueError(
                f"{path}: a safetensors file, but not one of save_quantized (its header has no {_HEADER!r})"
            )
        if metadata.get(_HEADER_CHECKSUM) != _text_checksum(metadata[_HEADER]):
            raise ValueError(f"{path}: its header is corrupted: it does not match its checksum")
        self.header: dict[str, Any] = json.loads(metadata[_HEADER])
        version = self.header.get("version")
        if version != FORMAT_VERSION:
            raise ValueError(f"{path}: format version {version}; this qtorch reads version {FORMAT_VERSION}")
        owners = dict.fromkeys(root.keys(), path)
        self.files[str(path)] = root
        for name, keys in self.header["shards"].items():
            shard = path.with_name(name)
            if not shard.exists():
                raise ValueError(f"{path}: its shard {name} is missing")
            self.files[str(shard)] = handle = self._open(shard)
            owners.update({key: shard for key in keys if key in handle.keys()})  # noqa: SIM118
        if missing := sorted(set(self.header["checksums"]) - set(owners)):
            raise ValueError(f"{path}: missing key {', '.join(missing[:4])}")
        self.owners = owners

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *error: Any) -> None:
        self.files.clear()

    def _open(self, path: Path) -> Any:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path}: truncated, or not a safetensors file ({error})") from error

    def read(self, key: str) -> Tensor:
        if key not in self.owners:
            raise ValueError(f"{self.path}: missing key {key}")
        owner = self.owners[key]
        tensor: Tensor = self.files[str(owner)].get_tensor(key)
        if self.verify and _checksum(tensor) != self.header["checksums"][key]:
            raise ValueError(f"{owner}: {key} is corrupted: its data does not match its checksum")
        return tensor

    def read_all(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {name: self.read(name) for name in self.header["plain"]}
        for name, entry in self.header["quantized"].items():
            parts = {stored: self.read(stored) for stored in entry["tensors"].values()}
            try:
                tensors[name] = from_canonical(entry, parts.__getitem__)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{self.path}: {name}: {error}") from error
        return tensors


def _named_tensors(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(source, nn.Module):
        return dict(source)
    for name, module in source.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(f"save_quantized: {name or 'the model'} has extra state, which safetensors cannot hold")
    return {name: tensor for name, (_, _, tensor) in _slots(source)}


def _slots(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, Tensor]]]:
    """Every place that holds a parameter or buffer: (full name, (module, attribute, tensor))."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, (module, attribute, tensor)


def _canonical(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors to store, by stored name, and the header."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {"version": FORMAT_VERSION, "plain": [], "quantized": {}, "aliases": {}}
    first_name: dict[Any, str] = {}
    for name, tensor in named.items():
        if problem := _problem(tensor):
            raise ValueError(f"save_quantized: {name} is {problem}")
        original = first_name.setdefault(_identity(tensor), name)
        if original != name:
            header["aliases"][name] = original
            continue
        if isinstance(tensor, AffineQuantizedTensor):
            stored, header["quantized"][name] = to_canonical(name, tensor)
        else:
            stored = {name: tensor.resolve_conj().resolve_neg()}
            header["plain"].append(name)
        if clash := stored.keys() & tensors.keys():
            raise ValueError(f"save_quantized: two tensors would be stored as {', '.join(clash)}")
        tensors |= {key: value.detach().cpu().contiguous() for key, value in stored.items()}
    return tensors, header


def _problem(value: Any) -> str | None:
    """What keeps a value out of the file."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}, not a tensor"
    if nn.parameter.is_lazy(value):
        return "not initialized yet; run the model once"
    if value.is_meta:
        return "on the meta device"
    if isinstance(value, AffineQuantizedTensor):
        return None
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"a {type(value).__name__}, which has no canonical form"
    if value.layout is not torch.strided or not _has_safetensors(value.dtype):
        return f"a {value.layout} tensor of {value.dtype}, which safetensors cannot hold"
    return None


@functools.cache
def _has_safetensors(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, RuntimeError):
        return False
    return True


def _identity(tensor: Tensor) -> Any:
    """Equal for two names of the same data, in the same form."""
    if isinstance(tensor, AffineQuantizedTensor):
        return tensor.scheme, *[_identity(inner) for inner in tensor.inner_tensors.values()]
    if tensor.numel() == 0:
        return id(tensor)
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(), *bits


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


def _stem(path: Path) -> str:
    """What the names of its shards begin with, and those of no other path's."""
    return path.stem if path.suffix == ".safetensors" else f"{path.name}."


def _remove_leftovers(path: Path, shards: list[str]) -> None:
    """Shards of former saves, and what saves that were killed have left."""
    token = "[0-9a-f]" * 8
    for stale in path.parent.glob(f"{glob.escape(_stem(path))}-{token}-[0-9]*-of-[0-9]*.safetensors"):
        if stale.name not in shards:
            stale.unlink(missing_ok=True)
    for folder in path.parent.glob(f".{glob.escape(path.name)}.{token}.tmp"):
        shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write and flush to disk, with the permissions of a new file."""
    # safetensors refuses tensors that share memory: all but the first, and views of a larger storage, become copies.
    own: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        shared = storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        own[name] = tensor.clone() if shared else tensor
    try:
        save_file(own, path, {"format": "pt", **metadata})
    except SafetensorError as error:
        raise OSError(f"save_quantized: cannot write {path}: {error}") from error
    path.chmod(path.parent.stat().st_mode & 0o666)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _checksum(tensor: Tensor) -> int:
    """Of the data, the dtype and the shape."""
    kind = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, kind)


def _text_checksum(text: str) -> str:
    return str(zlib.crc32(text.encode()))


def _check_names(path: Path, slots: Mapping[str, tuple[nn.Module, str, Tensor]], found: set[str]) -> None:
    problems = []
    # A buffer that the file leaves out keeps the value it has, if it has one.
    missing = [
        name
        for name, (_, _, tensor) in slots.items()
        if name not in found and (isinstance(tensor, nn.Parameter) or tensor.is_meta)
    ]
    if missing:
        problems.append(f"missing key {', '.join(missing[:4])}" + (", ..." if len(missing) > 4 else ""))
    if unexpected := sorted(found - slots.keys()):
        problems.append(f"unexpected key {', '.join(unexpected[:4])}" + (", ..." if len(unexpected) > 4 else ""))
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}; the model is unchanged")


def _check_shape(path: Path, name: str, new: Tensor, old: Tensor) -> None:
    if nn.parameter.is_lazy(old):
        raise ValueError(f"{path}: {name} of the model is not initialized yet; run the model once")
    if new.shape != old.shape:
        raise ValueError(
            f"{path}: {name} has shape {tuple(new.shape)}, the model's has {tuple(old.shape)}; the model is unchanged"
        )
