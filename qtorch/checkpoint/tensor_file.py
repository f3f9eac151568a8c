"""A file in the safetensors format: the length of a JSON header in 8 bytes, the header, the data of the tensors.

The files are compatible with the safetensors library, which only maps files, by name: truncating a mapped file kills
the process, overwriting it changes the weights, and a name may refer to another file from one call to the next. Here a
file is opened once, and read into memory unless `map` is called.

Tensors are written at multiples of 64 bytes, as torch allocates them, since the last bit of matrix products depends on
the alignment. The format has no gaps between tensors, so those whose size is not a multiple of 64 come last.
"""

import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..primitives.files import MAX_JSON, Closable, open_regular, parse_json
from ..primitives.tracing import plain_name

ALIGNMENT = 64

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
"""Names of the dtypes in the format."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

METADATA = "__metadata__"
LENGTH_BYTES = 8
_MAX_SIZE = 2**63
"""No tensor has this many elements."""


class Stored(NamedTuple):
    """A tensor in a file: its dtype and shape, and the bytes from `start` to `stop` that hold its data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file of tensors, contiguous, on the CPU and in dtypes of `DTYPES`, and flush it to disk."""
    for name in tensors:
        check_name(name)
    order = sorted(tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT != 0, -item[1].element_size()))
    header = header_of(metadata, ((name, NAMES[t.dtype], list(t.shape), t.nbytes) for name, t in order))
    with open(path, "wb") as file:
        file.write(header)
        for _, tensor in order:
            file.write(data_of(tensor))
        file.flush()
        os.fsync(file.fileno())


def header_of(metadata: Mapping[str, str], tensors: Iterable[tuple[str, str, list[int], int]], room: int = 0) -> bytes:
    """The first bytes of a file, `room` at least, of tensors (name, dtype, shape, bytes) in their order."""
    header: dict[str, Any] = {METADATA: dict(metadata)}
    stop = 0
    for name, dtype, shape, nbytes in tensors:
        start, stop = stop, stop + nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(max(room - LENGTH_BYTES, len(text) + -(LENGTH_BYTES + len(text)) % ALIGNMENT))
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def check_name(name: str) -> None:
    """Raise `ValueError` if no tensor of a file can have this name."""
    if name == METADATA:
        raise ValueError(f"{METADATA} is reserved by the format; rename the tensor")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name {name!r:.80} is no text that UTF-8 can hold; rename the tensor") from error


def data_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class TensorFile(Closable):
    """An open file with a validated header: metadata, and tensors of which none reaches beyond the data or overlaps
    another. A file that is truncated or in another format is a `ValueError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._file = open_regular(path)
        with self.closed_by_errors():
            self.metadata, self.stored = self._read_header()

    def close(self) -> None:
        """Close the file; mapped tensors stay valid."""
        self._file.close()

    def is_replaced(self) -> bool:
        """Whether the path now refers to another file."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def read(self, name: str) -> Tensor:
        """Read a tensor into memory."""
        stored = self.stored[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self._fill(data_of(tensor), stored.start)
        if stored.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise ValueError(f"{self.path}: {name} has bytes that are not booleans")
        return tensor

    def map(self, name: str) -> Tensor:
        """A tensor mapped from the file, which is read when it is used; a copy if it is not aligned."""
        stored = self.stored[name]
        if stored.start % ALIGNMENT or stored.start == stored.stop or stored.dtype is torch.bool:
            return self.read(name)
        if self._map is None:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        if len(self._map) < stored.stop:
            raise self._error("it has become shorter")
        count = math.prod(stored.shape)
        return torch.frombuffer(self._map, dtype=stored.dtype, count=count, offset=stored.start).view(stored.shape)

    def _fill(self, buffer: memoryview, position: int) -> None:
        self._file.seek(position)
        while len(buffer):
            count = self._file.readinto(buffer)
            if not count:
                raise self._error("it ends before its data does")
            buffer = buffer[count:]

    def _error(self, why: str) -> ValueError:
        with open_regular(self.path) as file:
            begin = file.read(4)
        if begin in (b"PK\x03\x04", b"\x80\x02\x8a\x0a"):  # a zip archive, or a pickle: the old format of torch.save
            return pickled_error(self.path)
        return ValueError(f"{self.path}: truncated, or not a safetensors file ({why})")

    def _read_header(self) -> tuple[dict[str, str], dict[str, Stored]]:
        size = os.fstat(self._file.fileno()).st_size
        if size < LENGTH_BYTES:
            raise self._error(f"it has {size} bytes")
        text = bytearray(LENGTH_BYTES)
        self._fill(memoryview(text), 0)
        length = int.from_bytes(text, "little")
        if length > min(MAX_JSON, size - LENGTH_BYTES):
            raise self._error(f"its header would have {length} bytes")
        text = bytearray(length)
        self._fill(memoryview(text), LENGTH_BYTES)
        try:
            return _parse(parse_json(bytes(text)), LENGTH_BYTES + length, size)
        except ValueError as error:
            raise self._error(str(error)) from error


def _parse(header: Any, begin: int, end: int) -> tuple[dict[str, str], dict[str, Stored]]:
    """(metadata, tensors) of a header whose tensors cover the bytes from `begin` to `end` of the file exactly."""
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"its {METADATA} is not an object of strings")
    stored = {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{name} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        nbytes = nbytes_of(name, dtype, shape)
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise ValueError(f"{name} has the offsets {offsets!r:.80}")
        if offsets[1] - offsets[0] != nbytes:
            raise ValueError(f"{name} takes {nbytes} bytes, its offsets are {offsets!r:.80}")
        stored[name] = Stored(DTYPES[dtype], tuple(shape), begin + offsets[0], begin + offsets[1])
    at = begin
    for name, tensor in sorted(stored.items(), key=lambda item: item[1][2:]):
        if tensor.start != at:
            raise ValueError(f"the data of {name} begins at {tensor.start}, not at {at}")
        at = tensor.stop
    if at != end:
        raise ValueError(f"the data ends at {at}, the file at {end}")
    return metadata, stored


def nbytes_of(name: str, dtype: Any, shape: Any) -> int:
    """Bytes of a tensor as a file describes it, by a dtype and a shape that must exist."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r:.40}; known: {', '.join(DTYPES)}")
    if not _are_sizes(shape) or math.prod(max(size, 1) for size in shape) >= _MAX_SIZE:
        raise ValueError(f"{name} has the shape {shape!r:.80}")
    return math.prod(shape) * DTYPES[dtype].itemsize


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def pickled_error(path: Path) -> ValueError:
    """The error to raise for a file of `torch.save`."""
    return ValueError(
        f"{path}: a file of torch.save, not of save_quantized; read it by "
        "model.load_state_dict(torch.load(path, weights_only=True), assign=True), or store it as safetensors, as "
        "save_pretrained of transformers does"
    )


OWN_FORMAT = "qtorch"
"""The name of this format."""

Place = tuple[nn.Module, str, Tensor]
"""A place that holds a parameter or buffer: (module, attribute, tensor)."""


def places_of(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """Every place that holds a parameter or buffer: (full name, (module, attribute, tensor)); the names are the same
    whether the model, or a part of it, is compiled. Layers that `fuse_projections` has joined have one place each, all
    of the module that holds their rows."""
    for prefix, module in ((plain_name(name), module) for name, module in model.named_modules(remove_duplicate=False)):
        parts_of = getattr(module, "parts_of_state", None)
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                for each, part in ({name: tensor} if parts_of is None else parts_of(name, tensor)).items():
                    yield each, (module, attribute, part)


def checksum(tensor: Tensor) -> int:
    """crc32 of the data, the dtype and the shape of a tensor."""
    kind = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(data_of(tensor.contiguous()), kind)
