"""The container of GGUF: a header with typed metadata and the place of each tensor, then the data.

    "GGUF", version (uint32), number of tensors, number of entries (uint64)
    entries     key, type (uint32), value
    tensors     name, number of axes (uint32), sizes (uint64, the last axis first), type (uint32), offset (uint64)
    data        from the next multiple of general.alignment on; offsets count from there

A string is its length (uint64) and its bytes; an array is the type of its items, their number (uint64), the items. All
numbers are little-endian. Source: the specification of GGUF in the repository of ggml.

The package `gguf` has a reader. It trusts the file (a damaged length makes it loop over 2^60 items, or fail with an
error of numpy), maps it, and makes an object for each token of the vocabulary; so the header is parsed here.

`GgufSource` has the tensors by the names of transformers, quantized ones kept packed. Every number equals what
`gguf.quants.dequantize` gives in fp32, with the changes of `architectures` undone. What the file says beside tensors
(the vocabulary, the config) is not read.
"""

import math
import os
import struct
from contextlib import AbstractContextManager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from ....primitives.files import naming, open_regular
from ...sources import Contents, Source, register_source
from ...tensor_file import data_of
from .architectures import Parameter, names_of, undo_permutation
from .block_types import TYPES, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Of the data, where the metadata do not say another."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by the number of the type of a value."""

_STRING, _ARRAY = 8, 9
_MAX_AXES = 4
_MAX_NESTING = 4
_MAX_KEPT = 65536
"""Items of an array of numbers that are kept; longer arrays, and those of strings, are vocabularies."""

_MAX_SIZE = 2**63

_MAX_HEADER = 1 << 27
"""Bytes: a vocabulary of a million tokens and its merges take a third of it."""

_MAX_NAME = 65535
"""Bytes of a key, by the specification; names of tensors have 64."""

_MAX_ITEMS = 1 << 21
"""Strings and arrays in arrays, all together: each is looked at."""


class Info(NamedTuple):
    """A tensor as the header describes it: its type by number, its shape in torch's order, where its data begin."""

    type: int
    shape: tuple[int, ...]
    offset: int


class GgufFile:
    """An open GGUF file of `size` bytes with a parsed header: tensors, and numbers, strings and short arrays of numbers
    as metadata. Whether the data of a tensor is in the file is checked when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = BufferedReader(open_regular(path))
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            header = _Header(self._file, self.size)
            self.metadata, self.tensors = header.parse()
        except BaseException as error:
            self.close()
            if isinstance(error, ValueError | OverflowError):
                raise ValueError(f"{path}: truncated, or not a GGUF file ({error})") from error
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, name: str, start: int, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes from `start` on of the data of a tensor, uint8."""
        offset = self.tensors[name].offset + start
        if offset + nbytes > self.size:
            raise ValueError(f"truncated: its data ends at {offset + nbytes}, the file at {self.size}")
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._file.seek(offset)
        if self._file.readinto(data_of(tensor)) != nbytes:
            raise ValueError("truncated: it ends before the data does")
        return tensor


class _Header:
    """Parses the header; each length is checked against what is left of the file before anything is read."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size, self.left, self.items = file, size, min(size, _MAX_HEADER), _MAX_ITEMS

    def parse(self) -> tuple[dict[str, Any], dict[str, Info]]:
        header = self.left
        if self.bytes(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self.number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "big-endian, which is not read" if swapped in VERSIONS else f"version {version}; read are 2 and 3"
            raise ValueError(why)
        tensor_count, entry_count = self.number("Q"), self.number("Q")
        # The shortest entry and the shortest tensor have this many bytes.
        self.expect(entry_count * 13 + tensor_count * 24, "its header")
        metadata = self.entries(entry_count)
        tensors = self.infos(tensor_count)
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is a power of two, got {alignment!r:.40}")
        begin = -(-(header - self.left) // alignment) * alignment
        for name, info in tensors.items():
            if info.offset % alignment:
                raise ValueError(f"the offset {info.offset} of {name} is not a multiple of {alignment}")
        return metadata, {name: info._replace(offset=begin + info.offset) for name, info in tensors.items()}

    def entries(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self.name()
            if key in metadata:
                raise ValueError(f"it has two entries {key!r:.80}")
            metadata[key] = self.value(self.number("I"))
        return metadata

    def infos(self, count: int) -> dict[str, Info]:
        infos: dict[str, Info] = {}
        for _ in range(count):
            name, axes = self.name(), self.number("I")
            if not 1 <= axes <= _MAX_AXES:
                raise ValueError(f"{name!r:.80} has {axes} axes")
            shape = tuple(self.number("Q") for _ in range(axes))[::-1]
            if math.prod(max(size, 1) for size in shape) >= _MAX_SIZE:
                raise ValueError(f"{name!r:.80} has the shape {shape}")
            if name in infos:
                raise ValueError(f"it has two tensors {name!r:.80}")
            infos[name] = Info(self.number("I"), shape, self.number("Q"))
        return infos

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array(nesting + 1)
        if kind not in _SCALARS:
            raise ValueError(f"a value has the type {kind}")
        return self.number(_SCALARS[kind])

    def array(self, nesting: int) -> Any:
        """A list of numbers; None for what is not kept."""
        if nesting > _MAX_NESTING:
            raise ValueError(f"arrays are nested more than {_MAX_NESTING} times")
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            form = struct.Struct(f"<{_SCALARS[kind]}")
            self.expect(count * form.size, "an array")
            if count > _MAX_KEPT:
                self.skip(count * form.size)
                return None
            return [value for (value,) in form.iter_unpack(self.bytes(count * form.size))]
        if kind not in (_STRING, _ARRAY):
            raise ValueError(f"items of an array have the type {kind}")
        # Each string has at least its length, each array its type and length.
        self.expect(count * (8 if kind == _STRING else 12), "an array")
        self.items -= count
        if self.items < 0:
            raise ValueError(f"its arrays have more than {_MAX_ITEMS} strings and arrays")
        for _ in range(count):
            if kind == _STRING:
                self.skip(self.number("Q"))
            else:
                self.array(nesting + 1)
        return None

    def name(self) -> str:
        """Of an entry or a tensor."""
        length = self.number("Q")
        if length > _MAX_NAME:
            raise ValueError(f"a name would have {length} bytes")
        return self.bytes(length).decode("utf-8")

    def text(self) -> str | None:
        """A string; None for one that is not kept, such as a template."""
        length = self.number("Q")
        if length <= _MAX_KEPT:
            return self.bytes(length).decode("utf-8")
        self.skip(length)
        return None

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))[0]

    def bytes(self, count: int) -> bytes:
        self.expect(count, "its header")
        self.left -= count
        data = self.file.read(count)
        if len(data) != count:
            raise ValueError("it ends in its header")
        return data

    def skip(self, count: int) -> None:
        self.expect(count, "its header")
        self.left -= count
        self.file.seek(count, os.SEEK_CUR)

    def expect(self, count: int, what: str) -> None:
        if count > self.left:
            room = "the file" if self.size <= _MAX_HEADER else f"a header of {_MAX_HEADER} bytes"
            raise ValueError(f"{what} would have {count} bytes more, {room} has {self.left}")


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
    def open(cls, path: Path, *, verify: bool, mmap: bool) -> "GgufSource":
        """Open a file; GGUF has no checksums, and no tensor that needs no change, so both options have no effect."""
        return cls(GgufFile(path))

    def __init__(self, file: GgufFile) -> None:
        self.path, self.file = file.path, file
        self.metadata = file.metadata
        with self.closed_by_errors(), naming(self.path):
            self.parameters, self.aliases, self.note = names_of(file.metadata, file.tensors)
        self.names = self.parameters.keys() | self.aliases.keys()

    def close(self) -> None:
        self.file.close()

    def contents(self, name: str) -> Contents:
        with self._naming(name):
            kind, shape = self._form(self.parameters[name])
            return Contents(shape, kind.dtype or torch.float32, kind.tensor_bytes(shape), kind.scheme(shape))

    def tensor(self, name: str) -> torch.Tensor:
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
