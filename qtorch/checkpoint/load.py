"""Reading a checkpoint: all of it is checked before the model changes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..dtypes import QuantizedTensor
from ..dtypes.serialize import from_canonical
from ..model_argument import check_model
from ..module_repr import show_quantized
from .file_format import FORMAT_VERSION, HEADER, HEADER_CHECKSUM, Slot, checksum, is_of_torch_save, slots, text_checksum


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
        TypeError: `model` is no module.
    """
    check_model("load_quantized", model)
    path = Path(path)
    with _Reader(path, verify) as reader:
        loaded = reader.read_all()
        aliases: dict[str, str] = reader.header["aliases"]
    places = dict(slots(model))
    _check_names(path, places, loaded.keys() | aliases.keys())
    moved: dict[str, Tensor] = {}
    parameters: dict[str, nn.Parameter] = {}
    new: list[tuple[dict[str, Any], str, Tensor]] = []
    for name, (module, attribute, old) in places.items():
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
            frozen = isinstance(tensor, QuantizedTensor) or not tensor.is_floating_point()
            parameters[source] = nn.Parameter(tensor, old.requires_grad and not frozen)
        new.append((module._parameters, attribute, parameters[source]))
    for table, attribute, tensor in new:
        table[attribute] = tensor
    for module in model.modules():
        show_quantized(module)
    return model


class _Reader:
    """The root file and its shards, open, with the header parsed and the list of tensors checked."""

    def __init__(self, path: Path, verify: bool) -> None:
        self.path = path
        self.verify = verify
        self.files: dict[str, Any] = {}
        root = self._open(path)
        metadata = root.metadata() or {}
        if HEADER not in metadata:
            raise ValueError(
                f"{path}: a safetensors file, but not one of save_quantized (its header has no {HEADER!r})"
            )
        if metadata.get(HEADER_CHECKSUM) != text_checksum(metadata[HEADER]):
            raise ValueError(f"{path}: its header is corrupted: it does not match its checksum")
        self.header: dict[str, Any] = json.loads(metadata[HEADER])
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
            if is_of_torch_save(path):
                raise ValueError(
                    f"{path}: a file of torch.save, not of save_quantized; read it by "
                    "model.load_state_dict(torch.load(path, weights_only=True), assign=True)"
                ) from error
            raise ValueError(f"{path}: truncated, or not a safetensors file ({error})") from error

    def read(self, key: str) -> Tensor:
        if key not in self.owners:
            raise ValueError(f"{self.path}: missing key {key}")
        owner = self.owners[key]
        tensor: Tensor = self.files[str(owner)].get_tensor(key)
        if self.verify and checksum(tensor) != self.header["checksums"][key]:
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


def _check_names(path: Path, slots: Mapping[str, Slot], found: set[str]) -> None:
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
