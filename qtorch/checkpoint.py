"""save_quantized / load_quantized: quantized models on disk, in safetensors.

The file at `path` is the root: it holds the first tensors and, in its header, everything else there is to know. Above
`max_shard_size` the other tensors are in shards beside it, which the header names. Shards are written first, under
names
of their own, and the root is renamed into place last: whenever the process dies, `path` is either the old checkpoint,
whole, or the new one.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .dtypes import AffineQuantizedTensor
from .dtypes.serialize import from_canonical, to_canonical

FORMAT_VERSION = 1

_HEADER = "qtorch"


def save_quantized(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    max_shard_size: int = 5 * 2**30,
) -> None:
    """Write a model, or a state dict, with its quantized weights.

    Of a model, buffers that are not part of its state dict are saved too, so that one built on the meta device can be
    filled whole. Tied weights are written once.

    Args:
        path: name of the file, ``model.safetensors`` say.
        max_shard_size: bytes above which a further file is begun.

    Raises:
        ValueError: something in it is not a tensor with data, or two names clash.
    """
    path = Path(path)
    tensors, header = _canonical(_named_tensors(model_or_state_dict))
    shards = _split(tensors, max_shard_size)
    token = secrets.token_hex(4)
    names = [f"{path.stem}-{token}-{i:05d}-of-{len(shards) - 1:05d}.safetensors" for i in range(1, len(shards))]
    header["shards"] = {name: list(shard) for name, shard in zip(names, shards[1:], strict=True)}
    header["checksums"] = {name: _checksum(tensor) for name, tensor in tensors.items()}
    for name, shard in zip(names, shards[1:], strict=True):
        _write(path.with_name(name), shard, {})
    _write(path, shards[0], {_HEADER: json.dumps(header)})
    for stale in path.parent.glob(f"{path.stem}-{'[0-9a-f]' * 8}-*-of-*.safetensors"):
        if stale.name not in names:
            stale.unlink()


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
    new: dict[str, Tensor] = {}
    for name, tensor in loaded.items():
        old = slots[name][2]
        if tensor.shape != old.shape:
            raise ValueError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the model's has {tuple(old.shape)}; "
                "the model is unchanged"
            )
        target = device or ("cpu" if old.is_meta else old.device)
        tensor = tensor.to(target)
        if isinstance(old, nn.Parameter):
            frozen = isinstance(tensor, AffineQuantizedTensor) or not tensor.is_floating_point()
            tensor = nn.Parameter(tensor, old.requires_grad and not frozen)
        new[name] = tensor
    for name, (module, attribute, old) in slots.items():
        source = aliases.get(name, name)
        if source in new:
            table = module._parameters if isinstance(old, nn.Parameter) else module._buffers
            table[attribute] = new[source]  # type: ignore[assignment]
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
            try:
                tensors[name] = from_canonical(entry, self.read)
            except (KeyError, ValueError) as error:
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
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            what = "on the meta device" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}, not a tensor"
            raise ValueError(f"save_quantized: {name} is {what}")
        original = first_name.setdefault(_identity(tensor), name)
        if original != name:
            header["aliases"][name] = original
            continue
        if isinstance(tensor, AffineQuantizedTensor):
            stored, header["quantized"][name] = to_canonical(name, tensor)
        elif type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
            stored = {name: tensor}
            header["plain"].append(name)
        else:
            raise ValueError(f"save_quantized: {name} is a {type(tensor).__name__}, which has no canonical form")
        if clash := stored.keys() & tensors.keys():
            raise ValueError(f"save_quantized: two tensors would be stored as {', '.join(clash)}")
        tensors |= {key: value.detach().cpu().contiguous() for key, value in stored.items()}
    return tensors, header


def _identity(tensor: Tensor) -> Any:
    """Equal for two names of the same data, in the same form."""
    if isinstance(tensor, AffineQuantizedTensor):
        return tensor.scheme, *[_identity(inner) for inner in tensor.inner_tensors.values()]
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()


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


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write under a temporary name, flush to disk, rename."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # safetensors refuses tensors that share memory; views of a larger storage become copies of their own.
    own = {k: t.clone() if t.untyped_storage().nbytes() != t.nbytes else t for k, t in tensors.items()}
    try:
        save_file(own, temporary, {"format": "pt", **metadata})
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


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
