"""Source: a checkpoint that is open for reading, of any registered format.

A format is added by one file: a subclass of `Source` with `@register_source`. Then `load_quantized` reads it. Whatever
is wrong with a file is a `ValueError` that names the file and, where it is known, the tensor (`files.naming`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import torch

from ..dtypes.serialize import Entry, from_canonical, scheme_of
from ..primitives import files, spec
from .header import HEADER_CHECKSUM, Header
from .tensor_file import Stored, TensorFile, checksum, pickled_error

SOURCES: list[type[Source]] = []
"""Every registered format."""

C = TypeVar("C", bound="type[Source]")


class Contents(NamedTuple):
    """What is known of a stored parameter without its data: logical shape and dtype, bytes in the file, its scheme."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    scheme: spec.Scheme | None = None


class Source(files.Closable, ABC):
    """A checkpoint that is open for reading; a context manager.

    Attributes:
        names: names of all parameters and buffers, aliases included.
        aliases: further name of a tensor -> its name.
        note: where names come from, for the error where they are not those of a model; may be empty.
    """

    format: ClassVar[str]
    path: Path
    names: Set[str]
    aliases: Mapping[str, str] = {}
    note: str = ""

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Whether the file or folder, which exists, is of this format, judged from its header; reads no tensors."""
        return False

    @classmethod
    def open(cls, path: Path, *, verify: bool, mmap: bool) -> Source:
        """Open a checkpoint of this format, and validate its header; `verify` and `mmap` as for `load_quantized`, in
        formats that have checksums, or tensors that can be mapped."""
        raise NotImplementedError

    @abstractmethod
    def contents(self, name: str) -> Contents:
        """What is stored under `name`, which must not be an alias."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """Read the tensor called `name`, which must not be an alias: a `QuantizedTensor` if it is stored quantized."""

    def optional(self) -> Set[str]:
        """Names that a model need not have, because it computes the same without them: biases that are zero."""
        return frozenset()


PICKLES = (".bin", ".pt", ".pth")
"""Ends of the names of files of `torch.save`."""


def register_source(cls: C) -> C:
    """Class decorator: `open_source` considers the format from now on, before those registered earlier."""
    SOURCES.insert(0, cls)
    return cls


def open_source(path: Path, *, verify: bool = True, mmap: bool = False) -> Source:
    """Open a checkpoint in the first format that recognizes it."""
    if not os.path.exists(path):  # not `Path.exists`, which raises for a name that is too long
        raise FileNotFoundError(f"{path}: no such file")
    kind = next((kind for kind in SOURCES if kind.recognizes(path)), None)
    if kind is None:
        if path.is_dir() and (pickled := sorted(file for file in path.iterdir() if file.suffix in PICKLES)):
            raise pickled_error(pickled[0])
        if path.is_dir() and not any(path.iterdir()):
            raise ValueError(f"{path}: the folder is empty")
        raise ValueError(f"{path}: no known format; known are {', '.join(sorted(kind.format for kind in SOURCES))}")
    return kind.open(path, verify=verify, mmap=mmap)


class CanonicalSource(Source):
    """A `Source` that stores quantized tensors in canonical form, with an entry of `to_canonical` for each, by name;
    all stored names that entries give exist."""

    entries: Mapping[str, Entry]

    @abstractmethod
    def stored(self, key: str) -> Stored:
        """Dtype, shape and place of what is stored under `key`."""

    @abstractmethod
    def read(self, key: str) -> torch.Tensor:
        """Read what is stored under `key`."""

    def contents(self, name: str) -> Contents:
        entry = self.entries.get(name)
        parts = [self.stored(key) for key in ([name] if entry is None else entry["tensors"].values())]
        nbytes = sum(part.stop - part.start for part in parts)
        if entry is None:
            return Contents(parts[0].shape, parts[0].dtype, nbytes)
        with files.naming(self.path, name):
            scheme = scheme_of(entry)
        return Contents(scheme.shape, scheme.dtype, nbytes, scheme)

    def tensor(self, name: str) -> torch.Tensor:
        entry = self.entries.get(name)
        if entry is None:
            return self.read(name)
        # Errors of `read` name the file and the tensor already.
        parts = {key: self.read(key) for key in entry["tensors"].values()}
        with files.naming(self.path, name):
            return from_canonical(entry, parts.pop)


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
        self.path, self.verify, self.mmap = root.path, verify, mmap
        with files.naming(self.path):
            self.header = Header.parse(root.metadata)
        self.names, self.aliases, self.entries = self.header.names, self.header.aliases, self.header.quantized
        self.owners: dict[str, TensorFile] = dict.fromkeys(root.stored, root)
        self.files = [root]
        try:
            for name, keys in self.header.shards.items():
                try:
                    shard = TensorFile(self.path.with_name(name))
                except FileNotFoundError as error:
                    raise ValueError(f"{self.path}: its shard {name} is missing") from error
                self.files.append(shard)
                if twice := [key for key in keys if key in self.owners]:
                    raise ValueError(f"{self.path}: {twice[0]} is in it and in its shard {name}")
                self.owners |= dict.fromkeys(keys & shard.stored.keys(), shard)
            if missing := sorted(set(self.header.stored) - self.owners.keys()):
                raise ValueError(f"{self.path}: missing key {', '.join(missing[:4])}")
        except BaseException:
            for shard in self.files[1:]:
                shard.close()
            raise

    @property
    def checksum(self) -> str:
        """Of the header, which has those of all tensors."""
        return self.files[0].metadata[HEADER_CHECKSUM]

    def close(self) -> None:
        for file in self.files:
            file.close()

    def stored(self, key: str) -> Stored:
        return self.owners[key].stored[key]

    def read(self, key: str) -> torch.Tensor:
        file = self.owners[key]
        read: Callable[[str], torch.Tensor] = file.map if self.mmap else file.read
        tensor = read(key)
        if self.verify and checksum(tensor) != self.header.checksums[key]:
            raise ValueError(f"{file.path}: {key} is corrupted: its data does not match its checksum")
        return tensor
