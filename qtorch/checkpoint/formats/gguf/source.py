"""GGUF as a `Source`: tensors by their names of transformers, quantized ones kept packed.

Every number equals what `gguf.quants.dequantize` gives in fp32. What the file says beside tensors (the vocabulary, the
config) is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ....primitives.files import naming, open_regular
from ...sources import Contents, Source, register_source
from .block_types import TYPES, BlockType
from .container import MAGIC, GgufFile
from .tensor_names import Parameter, names_of


def undo_permutation(rows: Tensor, heads: int) -> Tensor:
    """Rows (N, ...) of `heads` heads from the order of llama.cpp to that of transformers.

    Rotary embeddings turn pairs of elements of a head: in transformers i and i + d/2, in llama.cpp 2 i and 2 i + 1. So
    llama.cpp stores the rows of a head, d of them, as 0, d/2, 1, d/2 + 1, ... A row of blocks moves as it is.
    """
    if rows.shape[0] % (2 * heads):
        raise ValueError(f"{rows.shape[0]} rows are not an even number for each of {heads} heads")
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


@register_source
class GgufSource(Source):
    """An open GGUF file."""

    format = "gguf"

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        if not path.is_file():
            return False
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC

    @classmethod
    def open(cls, path: Path, *, verify: bool, mmap: bool) -> GgufSource:
        """Open a file; GGUF has no checksums, and no tensor that needs no change, so both options have no effect."""
        return cls(GgufFile(path))

    def __init__(self, file: GgufFile) -> None:
        self.path, self.file = file.path, file
        self.metadata = file.metadata
        try:
            with naming(self.path):
                self.parameters, self.aliases, self.note = names_of(file.metadata, file.tensors)
        except ValueError:
            file.close()
            raise
        self.names = self.parameters.keys() | self.aliases.keys()

    def close(self) -> None:
        self.file.close()

    def contents(self, name: str) -> Contents:
        with self._naming(name):
            kind, shape = self._form(self.parameters[name])
            return Contents(shape, kind.dtype or torch.float32, kind.tensor_bytes(shape), kind.scheme(shape))

    def tensor(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        with self._naming(name):
            kind, shape = self._form(parameter)
            kind.scheme(shape)  # an error before anything is read
            parts = []
            for stored in parameter.stored:
                of_part = self.file.tensors[stored].shape
                rows = self.file.read(stored, 0, kind.tensor_bytes(of_part))
                parts.append(rows.reshape(*of_part[:-1], kind.row_bytes(of_part)))
            data = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
            if parameter.heads:
                # The rows of a bias are numbers.
                data = undo_permutation(data.reshape(shape[0], -1), parameter.heads)
            tensor = kind.tensor(data.reshape(-1), shape)
            return tensor - parameter.subtract if parameter.subtract else tensor

    def _form(self, parameter: Parameter) -> tuple[BlockType, tuple[int, ...]]:
        """(type, shape) of a parameter."""
        infos = [self.file.tensors[stored] for stored in parameter.stored]
        first = infos[0]
        kind, shape = _type(first.type), first.shape
        kind.row_bytes(shape)
        if len(infos) > 1:
            kinds = [_type(info.type).name for info in infos]
            if len(set(kinds)) > 1 or any(info.shape != shape for info in infos) or len(shape) < 2:
                shapes = " and ".join(f"{name} {info.shape}" for name, info in zip(kinds, infos, strict=True))
                raise ValueError(f"{' and '.join(parameter.stored)} become one tensor, but are {shapes}")
            shape = (*shape[:-2], len(infos) * shape[-2], shape[-1])
        if parameter.is_row and len(shape) == 1:
            shape = (1, *shape)
        if parameter.subtract and kind.dtype is not torch.float32:
            raise ValueError(f"{parameter.subtract} is subtracted from it, which takes F32, got {kind.name}")
        return kind, shape

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            if str(error).startswith(str(self.path)):
                raise
            stored = " and ".join(self.parameters[name].stored)
            raise ValueError(f"{self.path}: {name} ({stored}): {error}") from error


def _type(number: int) -> BlockType:
    if number not in TYPES:
        raise ValueError(f"it has the type {number}; known are {', '.join(kind.name for kind in TYPES.values())}")
    return TYPES[number]
