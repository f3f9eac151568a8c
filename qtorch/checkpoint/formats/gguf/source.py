"""GGUF as a `Source`: tensors by the names that transformers has for them, quantized ones kept packed.

Every number equals what `gguf.quants.dequantize` gives in fp32, with the changes of `architectures` undone. What the
file says beside tensors (the vocabulary, the config) is not read.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from ....primitives.files import naming, open_regular
from ...sources import Contents, Source, register_source
from .architectures import Parameter, names_of, undo_permutation
from .block_types import TYPES, BlockType
from .container import MAGIC, GgufFile


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

    def _naming(self, name: str) -> AbstractContextManager[None]:
        return naming(self.path, f"{name} ({' and '.join(self.parameters[name].stored)})")


def _type(number: int) -> BlockType:
    if number not in TYPES:
        raise ValueError(f"it has the type {number}; known are {', '.join(kind.name for kind in TYPES.values())}")
    return TYPES[number]
