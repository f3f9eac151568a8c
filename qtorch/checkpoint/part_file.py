"""PartFile: a safetensors file that grows by one tensor at a time, without a tensor in memory.

A safetensors file begins with a header that describes all tensors. Room for it is left, and filled at the end: the
format allows spaces after the text. If it turns out too small, the data are copied behind a larger one.

Tensors have to begin at multiples of 64 bytes, without gaps. Those whose size is no multiple of 64, such as biases, go
into a second file first, and are appended at the end, large elements before small ones.
"""

import json
import math
import os
import shutil
import stat
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torch import Tensor

from ..primitives.files import read_json
from . import tensor_file
from .tensor_file import ALIGNMENT, DTYPES, LENGTH_BYTES, NAMES, check_name, checksum, data_of, header_of, nbytes_of

JOURNAL = "journal.json"

_MOST_BYTES = 1 << 31
_MOST_VALUES = 1 << 26
"""Of a journal: a row of a report, an entry of a header and a few tensors for each weight of a model."""


class Damaged(ValueError):
    """What an earlier process left cannot be continued: begin anew."""


def say_anew(what: Path, error: Damaged) -> None:
    """Say that work is begun anew, and why."""
    warnings.warn(f"{what}: begun anew, since what an earlier process left is damaged: {error}", stacklevel=4)


def write_journal(path: Path, data: Any) -> int:
    """Replace the file in one step, when the data is on disk; the length of the text."""
    text = json.dumps(data)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(new, "x", encoding="ascii") as file:
        file.write(f'{{"crc32": {zlib.crc32(text.encode())}, "data": {text}}}')
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    return len(text)


def read_journal(path: Path) -> Any:
    """The data of `write_journal`, None if there is no such file. It may be anybody's, since a checksum is no
    signature: what is no journal, or does not match its checksum, is `Damaged`."""
    try:
        content = read_json(path, _MOST_BYTES, _MOST_VALUES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Damaged(str(error)) from error
    if not isinstance(content, dict) or content.keys() != {"crc32", "data"} or not isinstance(content["data"], dict):
        raise Damaged(f"{path}: it is not a journal")
    if content["crc32"] != zlib.crc32(json.dumps(content["data"]).encode()):
        raise Damaged(f"{path}: it does not match its checksum")
    return content["data"]


def own_folder(path: Path) -> None:
    """Make the folder if there is none; a link in its place, which leads elsewhere, is removed."""
    if path.is_symlink():
        path.unlink()
    path.mkdir(exist_ok=True)


def clear_folder(path: Path, keep: str) -> None:
    """Remove everything in a folder but the file `keep`; links are not followed. The journal goes first."""
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name != JOURNAL):
        if entry.name == keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def lock(path: Path, what: Path) -> int:
    """An open file that only one process can have; closing it, or the end of the process, releases it. It is made if
    there is none; what is not a regular file is removed. If another process has it, `BlockingIOError` says so of
    `what`."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        path.unlink()
    number = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        import fcntl
    except ImportError:  # not on Windows
        return number
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(number)
        raise BlockingIOError(f"{what}: another process is writing it") from error
    return number


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

    @classmethod
    def parse(cls, row: Any) -> "Written":
        """From JSON data, which may be untrusted."""
        if not isinstance(row, list) or len(row) != len(cls._fields) or not isinstance(row[0], str):
            raise ValueError(f"{row!r:.80} describes no tensor")
        made = cls(*row)
        check_name(made.name)
        if any(type(n) is not int for n in row[3:]) or made.nbytes != nbytes_of(made.name, made.dtype, made.shape):
            raise ValueError(f"{row!r:.80} describes no tensor")
        return made

    def is_in(self, file: BinaryIO, start: int) -> bool:
        """Whether the data of this tensor are in a file from `start` on."""
        file.seek(start)
        found = zlib.crc32(f"{DTYPES[self.dtype]} {tuple(self.shape)}".encode())
        for data in _chunks(file, self.nbytes):
            found = zlib.crc32(data, found)
        return found == self.crc32 and file.tell() == start + self.nbytes


class PartFile:
    """A file under construction, with `room` for the header. Until `finish` gives it its name, its data are in
    ``<path>.part`` and ``<path>.odd``; what follows the tensors that are `written` already is cut off, and shorter
    parts are `Damaged`."""

    def __init__(self, path: Path, room: int, written: list[Written] | None = None) -> None:
        self.path = path
        room = min(room, _LARGEST_ROOM)
        self.room = room + -(LENGTH_BYTES + room) % ALIGNMENT
        self.written = written or []
        self.part, self.odd = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.odd")
        self.sizes = [self.begin, 0]
        for tensor in self.written:
            self.sizes[tensor.is_odd] += tensor.nbytes
        # A finished file may have been moved already.
        self.is_finished = not self.part.exists() and (path.exists() or bool(self.written))
        self._files: list[BinaryIO] = [] if self.is_finished else [_open(self.part), _open(self.odd)]
        for file, size in zip(self._files, self.sizes, strict=False):
            if self.written and os.fstat(file.fileno()).st_size < size:
                self.close()
                raise Damaged(f"{path}: it is shorter than the journal says")
            file.truncate(size)
            file.seek(size)

    @property
    def begin(self) -> int:
        """Where the data begin."""
        return LENGTH_BYTES + self.room

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return sum(self.sizes) - self.begin

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a tensor, contiguous and on the CPU."""
        check_name(name)
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
        return {"room": self.room, "written": [list(tensor) for tensor in self.written]}

    @classmethod
    def from_json(cls, path: Path, data: Any, moved: Path | None = None) -> "PartFile":
        """Continue the file that `to_json` described; `moved` is where it may be once it is finished.

        The data may be untrusted: it is `Damaged` unless there is a file that holds these tensors.
        """
        try:
            room, written = data["room"], [Written.parse(row) for row in data["written"]]
            made = None if type(room) is not int or room < 0 else cls(path, room, written)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise Damaged(f"{path}: {error}") from error
        if made is None or made.room != room:
            raise Damaged(f"{path}: its header has {room!r:.40} bytes")
        place = path if path.exists() or moved is None else moved
        try:
            made._verify(place)
        except (OSError, ValueError) as error:
            made.close()
            raise Damaged(str(error)) from error
        return made

    def _verify(self, place: Path) -> None:
        """Raise `ValueError` unless the tensors are there."""
        if self.is_finished:
            with tensor_file.TensorFile(place) as finished:
                described = {tensor.name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for tensor in self.written}
                whole = described == {name: (of.dtype, of.shape) for name, of in finished.stored.items()} and all(
                    tensor.is_in(finished._file, finished.stored[tensor.name].start) for tensor in self.written
                )
        else:
            sizes = [self.begin, 0]
            whole = True
            for tensor in self.written:
                whole = whole and tensor.start == sizes[tensor.is_odd]
                whole = whole and tensor.is_in(self._files[tensor.is_odd], tensor.start)
                sizes[tensor.is_odd] += tensor.nbytes
            for file, size in zip(self._files, self.sizes, strict=True):
                file.seek(size)
        if not whole:
            raise ValueError(f"{place}: it does not hold the tensors that the journal describes")

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Complete the file, flush it to disk and give it its name; nothing if that has been done."""
        if self.is_finished:
            return
        part, odd = self._files
        order = sorted(self.written, key=lambda t: -DTYPES[t.dtype].itemsize if t.is_odd else -math.inf)
        for tensor in [t for t in order if t.is_odd]:
            odd.seek(tensor.start)
            part.writelines(_chunks(odd, tensor.nbytes))
        rows = ((t.name, t.dtype, t.shape, t.nbytes) for t in order)
        header = header_of({"format": "pt", **metadata}, rows, self.begin)
        if len(header) == self.begin:
            part.seek(0)
            part.write(header)
        else:  # copied behind a larger one
            place = self.path.with_name(f"{self.path.name}.larger")
            place.unlink(missing_ok=True)
            self._files[0] = larger = _open(place)
            larger.write(header)
            part.flush()
            part.seek(self.begin)
            shutil.copyfileobj(part, larger, 1 << 20)
            part.close()
            part = larger
        self.sync()
        self.close()
        os.replace(part.name, self.path)
        for leftover in (self.part, self.odd):
            leftover.unlink(missing_ok=True)
        self.is_finished = True

    def close(self) -> None:
        """Close the parts, finished or not."""
        for file in self._files:
            file.close()


def _open(path: Path) -> BinaryIO:
    def opened(name: str, flags: int) -> int:
        # Not what a link leads to.
        return os.open(name, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)

    return open(path, "r+b", opener=opened)


def _chunks(file: BinaryIO, count: int) -> Iterator[bytes]:
    """The next `count` bytes, fewer where the file ends."""
    while count and (data := file.read(min(count, 1 << 20))):
        yield data
        count -= len(data)
