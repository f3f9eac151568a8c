"""PartFile: a safetensors file that grows by one tensor at a time, without a tensor in memory.

A safetensors file begins with a header that describes all tensors. Room for it is left, and filled at the end: the
format allows spaces after the text. If it turns out too small, the data are copied behind a larger one.

Tensors have to begin at multiples of 64 bytes, without gaps. Those whose size is no multiple of 64, such as biases, go
into a second file first, and are appended at the end, large elements before small ones.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torch import Tensor

from .file_format import checksum
from .tensor_file import ALIGNMENT, DTYPES, NAMES, data_of

_LENGTH_BYTES = 8
_LARGEST_ROOM = 1 << 26


class Written(NamedTuple):
    """A tensor of the file: where its data begin, in the file of its kind, and their checksum."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    start: int
    crc32: int

    @property
    def is_odd(self) -> bool:
        return self.nbytes % ALIGNMENT != 0


class PartFile:
    """A file under construction.

    Args:
        path: name that the file gets by `finish`; until then its data are in ``<path>.part`` and ``<path>.odd``.
        room: bytes for the header.
        written: the tensors that the parts hold already; what follows them is cut off.
    """

    def __init__(self, path: Path, room: int, written: list[Written] | None = None) -> None:
        self.path = path
        room = min(room, _LARGEST_ROOM)
        self.room = room + -(_LENGTH_BYTES + room) % ALIGNMENT
        self.written = written or []
        self.part, self.odd = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.odd")
        self.sizes = [self.begin, 0]
        for tensor in self.written:
            self.sizes[tensor.is_odd] += tensor.nbytes
        # A finished file may have been moved already.
        self.is_finished = not self.part.exists() and (path.exists() or bool(self.written))
        self._files: list[BinaryIO] = [] if self.is_finished else [_open(self.part), _open(self.odd)]
        for file, size in zip(self._files, self.sizes, strict=False):
            file.truncate(size)
            file.seek(size)

    @property
    def begin(self) -> int:
        """Where the data begin."""
        return _LENGTH_BYTES + self.room

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return sum(self.sizes) - self.begin

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a tensor, contiguous and on the CPU."""
        is_odd = tensor.nbytes % ALIGNMENT != 0
        start = self.sizes[is_odd]
        self._files[is_odd].write(data_of(tensor))
        self.sizes[is_odd] += tensor.nbytes
        kind = NAMES[tensor.dtype]
        self.written.append(Written(name, kind, list(tensor.shape), tensor.nbytes, start, checksum(tensor)))

    def sync(self) -> None:
        """Flush the parts to disk."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def to_json(self) -> dict[str, Any]:
        """JSON data from which `from_json` continues."""
        return {"path": self.path.name, "room": self.room, "written": [list(tensor) for tensor in self.written]}

    @classmethod
    def from_json(cls, folder: Path, data: Mapping[str, Any]) -> PartFile:
        """Continue the file that `to_json` described."""
        return cls(folder / data["path"], data["room"], [Written(*tensor) for tensor in data["written"]])

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Complete the file, flush it to disk and give it its name; nothing if that has been done."""
        if self.is_finished:
            return
        part, odd = self._files
        at = self.sizes[0]
        entries = {tensor.name: tensor.start - self.begin for tensor in self.written if not tensor.is_odd}
        order = sorted((t for t in self.written if t.is_odd), key=lambda t: -DTYPES[t.dtype].itemsize)
        for tensor in order:
            entries[tensor.name] = at - self.begin
            odd.seek(tensor.start)
            _copy(odd, part, tensor.nbytes)
            at += tensor.nbytes
        of_name = {tensor.name: tensor for tensor in self.written}
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
        for name, start in entries.items():
            tensor = of_name[name]
            offsets = [start, start + tensor.nbytes]
            header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
        if len(text) <= self.room:
            _write_header(part, text.ljust(self.room))
        else:
            self._files[0] = part = self._behind(text)
        self.sync()
        self.close()
        os.replace(part.name, self.path)
        for leftover in (self.part, self.odd):
            leftover.unlink(missing_ok=True)
        self.is_finished = True

    def _behind(self, text: bytes) -> BinaryIO:
        """A copy of the part with a larger header."""
        larger = open(self.path.with_name(f"{self.path.name}.larger"), "wb")  # noqa: SIM115
        _write_header(larger, text.ljust(len(text) + -(_LENGTH_BYTES + len(text)) % ALIGNMENT))
        part = self._files[0]
        part.flush()
        part.seek(self.begin)
        shutil.copyfileobj(part, larger, 1 << 20)
        part.close()
        return larger

    def close(self) -> None:
        """Close the parts, finished or not."""
        for file in self._files:
            file.close()


def _open(path: Path) -> BinaryIO:
    path.touch()
    return open(path, "r+b")


def _write_header(file: BinaryIO, text: bytes) -> None:
    file.seek(0)
    file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
    file.write(text)


def _copy(source: BinaryIO, target: BinaryIO, count: int) -> None:
    while count:
        data = source.read(min(count, 1 << 20))
        target.write(data)
        count -= len(data)
