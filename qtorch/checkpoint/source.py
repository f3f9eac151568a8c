"""Source: a checkpoint that is open for reading, of any registered format.

A format is added by one file: a subclass of `Source` with `@register_source`. Then `load_quantized` reads it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..primitives.scheme import Scheme
from .tensor_file import pickled_error

SOURCES: list[type[Source]] = []
"""Every registered format."""

C = TypeVar("C", bound="type[Source]")


class Contents(NamedTuple):
    """What is known of a stored parameter without reading its data.

    Attributes:
        shape, dtype: logical; those of the dequantized tensor.
        nbytes: size in the file.
        scheme: None for a tensor that is not quantized.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    scheme: Scheme | None = None


class Source(ABC):
    """A checkpoint that is open for reading; a context manager.

    Attributes:
        format: name of the format, for messages.
        path: the file or folder.
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
    @abstractmethod
    def recognizes(cls, path: Path) -> bool:
        """Whether the file or folder, which exists, is of this format, judged from its header; reads no tensors."""

    @classmethod
    @abstractmethod
    def open(cls, path: Path, *, verify: bool, mmap: bool) -> Source:
        """Open a checkpoint of this format, and validate its header.

        Args:
            verify: compare tensors with their checksums, in formats that have any.
            mmap: map tensors that need no change instead of reading them, in formats that allow it.

        Raises:
            ValueError: the checkpoint is damaged, or cannot be represented exactly; the message names the file.
        """

    @abstractmethod
    def contents(self, name: str) -> Contents:
        """What is stored under `name`, which must not be an alias."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Read the tensor called `name`, which must not be an alias: a `QuantizedTensor` if it is stored quantized.

        Raises:
            ValueError: its data is damaged; the message names the file and the tensor.
        """

    def optional(self) -> Set[str]:
        """Names that a model need not have, because it computes the same without them: biases that are zero."""
        return frozenset()

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


PICKLES = (".bin", ".pt", ".pth")
"""Ends of the names of files of `torch.save`."""


def register_source(cls: C) -> C:
    """Class decorator: `open_source` considers the format from now on, before those registered earlier."""
    SOURCES.insert(0, cls)
    return cls


def open_source(path: Path, *, verify: bool = True, mmap: bool = False) -> Source:
    """Open a checkpoint in the first format that recognizes it.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: no format recognizes it, or it is damaged.
    """
    if not os.path.exists(path):  # not `Path.exists`, which raises for a name that is too long
        raise FileNotFoundError(f"{path}: no such file")
    kind = next((kind for kind in SOURCES if kind.recognizes(path)), None)
    if kind is None:
        if path.is_dir() and (pickled := sorted(file for file in path.iterdir() if file.suffix in PICKLES)):
            raise pickled_error(pickled[0])
        raise ValueError(f"{path}: no known format; known are {', '.join(sorted(kind.format for kind in SOURCES))}")
    return kind.open(path, verify=verify, mmap=mmap)
