"""GGUF as a `Source`: tensors by their names of transformers, quantized ones kept packed.

Every number equals what `gguf.quants.dequantize` gives in fp32. What the file says beside tensors (the vocabulary, the
config) is not read.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ....primitives.files import open_regular
from ...sources import Contents, Source, register_source
from .block_types import BlockType, block_type
from .container import MAGIC, GgufFile
from .tensor_names import Parameter, names_of

# --------------------------------------------------------------------------------------------------
# The order of the rows of q and k.
#
# Rotary embeddings turn pairs of elements of a head: in transformers i and i + d/2, in llama.cpp 2 i and 2 i + 1. So
# llama.cpp stores the rows of a head, d of them, as 0, d/2, 1, d/2 + 1, ... A row of blocks moves as it is.


def undo_permutation(rows: Tensor, heads: int) -> Tensor:
    """Rows (N, ...) of `heads` heads from the order of llama.cpp to that of transformers.

    Raises:
        ValueError: N is not an even number of rows for each head.
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
            self.parameters, self.aliases, self.note = names_of(file.metadata, file.tensors)
        except ValueError as error:
            file.close()
            raise ValueError(f"{self.path}: {error}") from error
        self.names = self.parameters.keys() | self.aliases.keys()

    def close(self) -> None:
        self.file.close()

    def contents(self, name: str) -> Contents:
        parameter = self.parameters[name]
        try:
            kind, shape = self._form(parameter)
            scheme = kind.scheme(shape)
            nbytes = kind.tensor_bytes(shape)
        except ValueError as error:
            raise self._error(name, error) from error
        return Contents(shape, kind.dtype or torch.float32, nbytes, scheme)

    def tensor(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        try:
            kind, shape = self._form(parameter)
            kind.scheme(shape)  # an error before anything is read
            return self._make(parameter, kind, shape)
        except ValueError as error:
            raise self._error(name, error) from error

    def _make(self, parameter: Parameter, kind: BlockType, shape: tuple[int, ...]) -> Tensor:
        parts = []
        for stored in parameter.stored:
            of_part = self.file.tensors[stored].shape
            rows = self.file.read(stored, 0, kind.tensor_bytes(of_part))
            parts.append(rows.reshape(*of_part[:-1], kind.row_bytes(of_part)))
        data = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
        if parameter.heads:
            # The rows of a bias are numbers.
            data = data.reshape(shape[0], -1)
            data = undo_permutation(data, parameter.heads)
        tensor = kind.tensor(data.reshape(-1), shape)
        if parameter.subtract:
            tensor = tensor - parameter.subtract
        return tensor

    def _form(self, parameter: Parameter) -> tuple[BlockType, tuple[int, ...]]:
        """(type, shape) of a parameter."""
        infos = [self.file.tensors[stored] for stored in parameter.stored]
        first = infos[0]
        kind, shape = block_type(first.type), first.shape
        kind.row_bytes(shape)
        if len(infos) > 1:
            kinds = [block_type(info.type).name for info in infos]
            if len(set(kinds)) > 1 or any(info.shape != shape for info in infos) or len(shape) < 2:
                shapes = " and ".join(f"{name} {info.shape}" for name, info in zip(kinds, infos, strict=True))
                raise ValueError(f"{' and '.join(parameter.stored)} become one tensor, but are {shapes}")
            shape = (*shape[:-2], len(infos) * shape[-2], shape[-1])
        if parameter.is_row and len(shape) == 1:
            shape = (1, *shape)
        if parameter.subtract and kind.dtype is not torch.float32:
            raise ValueError(f"{parameter.subtract} is subtracted from it, which takes F32, got {kind.name}")
        return kind, shape

    def _error(self, name: str, error: ValueError) -> ValueError:
        if str(error).startswith(str(self.path)):
            return error
        stored = " and ".join(self.parameters[name].stored)
        return ValueError(f"{self.path}: {name} ({stored}): {error}")
