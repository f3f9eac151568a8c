"""The own format of this package, as a `Source`: a file of `save_quantized` with its shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from .canonical_source import CanonicalSource
from .file_format import HEADER, HEADER_CHECKSUM, checksum, text_checksum
from .header import Header
from .source import register_source
from .tensor_file import Stored, TensorFile

_ATTEMPTS = 50
"""Number of attempts to open a checkpoint that is replaced meanwhile."""


@register_source
class QtorchSource(CanonicalSource):
    """The root file and its shards, kept open so that a save cannot replace them, and the validated header."""

    format = "qtorch"

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        # Any file that no other format recognizes: the errors of `TensorFile` say what is wrong with it.
        return not path.is_dir()

    @classmethod
    def open(cls, path: Path, *, verify: bool, mmap: bool) -> QtorchSource:
        """Open the checkpoint at `path`, and try again if a save replaces it and removes its shards meanwhile."""
        for attempt in range(_ATTEMPTS):
            root = TensorFile(path)
            try:
                return cls(root, verify, mmap)
            except BaseException as error:
                again = isinstance(error, ValueError) and attempt < _ATTEMPTS - 1 and root.is_replaced()
                root.close()
                if not again:
                    raise
        raise AssertionError

    def __init__(self, root: TensorFile, verify: bool, mmap: bool) -> None:
        self.path = root.path
        self.verify = verify
        self.mmap = mmap
        self.header = _read_header(root)
        self.names = self.header.names
        self.aliases = self.header.aliases
        self.entries = self.header.quantized
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

    def stored(self, key: str) -> Stored:
        return self.owners[key].stored[key]

    def read(self, key: str) -> Tensor:
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
