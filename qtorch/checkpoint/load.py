"""Loading a checkpoint: all of it is checked before the model changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ..dtypes import QuantizedTensor
from ..dtypes.serialize import from_canonical
from ..install import Change, install, keep_attributes
from ..model_argument import check_model
from ..module_repr import show_quantized
from .file_format import HEADER, HEADER_CHECKSUM, checksum, places_of, text_checksum
from .fit import check_fits, check_names
from .header import Header
from .tensor_file import TensorFile

_ATTEMPTS = 50
"""Number of attempts to open a checkpoint that is replaced meanwhile."""


def load_quantized(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    verify: bool = True,
    mmap: bool = False,
) -> nn.Module:
    """Load a file of `save_quantized` into `model`, which may be on the meta device or quantized already.

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
        ValueError: the file is truncated, corrupted, of another version, or does not fit the model, which is unchanged.
        TypeError: `model` is not a module.
    """
    check_model("load_quantized", model)
    path = Path(path)
    places = dict(places_of(model))
    with _open(path, verify, mmap) as checkpoint:
        aliases = checkpoint.header.aliases
        check_names(path, places, checkpoint.header.names)
        loaded: dict[str, Tensor] = {}
        changes: list[Change] = []
        for name, place in places.items():
            module, attribute, old = place
            source = aliases.get(name, name)
            if source not in checkpoint.header.names:
                continue
            if source not in loaded:
                loaded[source] = checkpoint.tensor(source)
                check_fits(path, name, place, loaded[source])
                loaded[source] = loaded[source].to(device or ("cpu" if old.is_meta else old.device))
            tensor = loaded[source]
            check_fits(path, name, place, tensor)
            if not isinstance(old, nn.Parameter):
                buffer = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
                changes.append(Change(module._buffers, attribute, keep_attributes(buffer, old)))
                continue
            if not isinstance(tensor, nn.Parameter):
                frozen = isinstance(tensor, QuantizedTensor) or not (tensor.is_floating_point() or tensor.is_complex())
                loaded[source] = tensor = nn.Parameter(tensor, old.requires_grad and not frozen)
            changes.append(Change(module._parameters, attribute, keep_attributes(tensor, old)))
    install(changes)
    for module in model.modules():
        show_quantized(module)
    return model


def _open(path: Path, verify: bool, mmap: bool) -> _Checkpoint:
    """Open the checkpoint at `path`, and try again if a save replaces it and removes its shards meanwhile."""
    for attempt in range(_ATTEMPTS):
        root = TensorFile(path)
        try:
            return _Checkpoint(root, verify, mmap)
        except BaseException as error:
            again = isinstance(error, ValueError) and attempt < _ATTEMPTS - 1 and root.is_replaced()
            root.close()
            if not again:
                raise
    raise AssertionError


class _Checkpoint:
    """The root file and its shards, kept open so that a save cannot replace them, and the validated header."""

    def __init__(self, root: TensorFile, verify: bool, mmap: bool) -> None:
        self.path = root.path
        self.verify = verify
        self.mmap = mmap
        self.header = _read_header(root)
        self.owners: dict[str, TensorFile] = dict.fromkeys(root.stored, root)
        self.files = [root]
        try:
            for name, keys in self.header.shards.items():
                self._add_shard(name, keys)
            if missing := sorted(set(self.header.stored) - self.owners.keys()):
                raise ValueError(f"{self.path}: missing key {', '.join(missing[:4])}")
        except BaseException:
            for shard in self.files[1:]:
                shard.close()
            raise

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _add_shard(self, name: str, keys: list[str]) -> None:
        try:
            shard = TensorFile(self.path.with_name(name))
        except FileNotFoundError as error:
            raise ValueError(f"{self.path}: its shard {name} is missing") from error
        self.files.append(shard)
        for key in keys:
            if key in self.owners:
                raise ValueError(f"{self.path}: {key} is in it and in its shard {name}")
            if key in shard.stored:
                self.owners[key] = shard

    def tensor(self, name: str) -> Tensor:
        """The parameter or buffer of this name, which must not be an alias."""
        entry = self.header.quantized.get(name)
        if entry is None:
            return self._read(name)
        # Errors of `_read` name the file and the tensor already.
        parts = {stored: self._read(stored) for stored in entry["tensors"].values()}
        try:
            return from_canonical(entry, parts.pop)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}: {name}: {error}") from error

    def _read(self, key: str) -> Tensor:
        file = self.owners[key]
        read: Callable[[str], Tensor] = file.map if self.mmap else file.read
        tensor = read(key)
        if self.verify and checksum(tensor) != self.header.checksums[key]:
            raise ValueError(f"{file.path}: {key} is corrupted: its data does not match its checksum")
        return tensor


def _read_header(root: TensorFile) -> Header:
    path, metadata = root.path, root.metadata
    if HEADER not in metadata:
        raise ValueError(f"{path}: a safetensors file, but not one of save_quantized (its header has no {HEADER!r})")
    if metadata.get(HEADER_CHECKSUM) != text_checksum(metadata[HEADER]):
        raise ValueError(f"{path}: its header is corrupted: it does not match its checksum")
    try:
        return Header.parse(metadata[HEADER])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
