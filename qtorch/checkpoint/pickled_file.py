"""A file of `torch.save` with a state dict, read without running what it says.

A pickle is a program for a machine with a stack, which may call any function. Here `run_pickle` runs the few operations
that a state dict takes, and a call makes a `Record` of what would be called: nothing is imported, and nothing is made
but records, numbers, texts, tuples, lists and dicts. Tensors lie in the same zip archive, not compressed. Source: torch
2.13 `serialization.py`, `_utils.py`; Python's `pickletools`.
"""

import json
import math
import os
import pickletools
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .tensor_file import NAMES, Stored, TensorFile, nbytes_of

_MAX_PICKLE = 1 << 26
"""Bytes of a pickle, in which tensors are names alone."""

_OF_STORAGE = {"torch.ByteStorage": "uint8", "torch.CharStorage": "int8"}
"""Dtypes that are not called as their storages are, such as torch.float of torch.FloatStorage."""


class Record(NamedTuple):
    """What a pickle would make: the full name of a function or class, and what it would be called with; None for the
    function or class itself."""

    name: str
    args: Any = None


_VALUES: dict[str, Callable[[], Any]] = {
    **{"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": bool},
    **{"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict},
}
_ARGUMENTS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
_TAKES: dict[str, int | None] = {
    **{"TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "APPENDS": None, "SETITEM": 2},
    **{"SETITEMS": None, "REDUCE": 2, "NEWOBJ": 2, "BINPERSID": 1, "BUILD": 1, "STOP": 1},
}
"""The number of values that an operation takes from the stack, None for all above the last mark."""


def run_pickle(data: bytes) -> Any:
    """What a pickle of protocol 2 gives, in which calls are `Record`s."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for operation, argument, _ in pickletools.genops(data):
        name = operation.name
        if name in _VALUES or name in _ARGUMENTS:
            stack.append(_VALUES[name]() if name in _VALUES else argument)
        elif name == "GLOBAL":
            stack.append(Record(f"{argument}".replace(" ", ".")))
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in _TAKES:
            count = _TAKES[name]
            at = marks.pop() if count is None else len(stack) - count
            if not 0 <= at <= len(stack):
                raise ValueError("its stack is empty")
            taken = stack[at:]
            del stack[at:]
            if name == "STOP":
                return taken[0]
            if name.startswith("TUPLE"):
                stack.append(tuple(taken))
            elif name.startswith("APPEND"):
                stack[-1].extend(taken)
            elif name.startswith("SETITEM"):
                if not all(isinstance(key, str | int) for key in taken[::2]):  # nested tuples may take ages to hash
                    raise ValueError("a dict has keys that are neither texts nor integers")
                stack[-1].update(zip(taken[::2], taken[1::2], strict=True))
            elif name == "BINPERSID":
                stack.append(Record("storage", taken[0]))
            elif name != "BUILD":  # a state that is left out: `_metadata` of the dict, settings of a layout
                called = taken[0].name
                stack.append({} if called == "collections.OrderedDict" else Record(called, taken[1]))
        elif name != "PROTO":
            raise ValueError(f"the operation {name} is in no state dict")
    raise ValueError("it does not end")


class PickledFile(TensorFile):
    """An open file of `torch.save`. Tensors of torchao's classes are there as in its safetensors files: their parts as
    tensors, and class and attributes in the metadata (`formats.torchao_folder`)."""

    def _error(self, why: str) -> ValueError:
        return ValueError(f"{self.path}: damaged, or not a state dict of torch.save ({why})")

    def _read_header(self) -> tuple[dict[str, str], dict[str, Stored]]:
        self.metadata, self.stored = {}, {}
        size = os.fstat(self._file.fileno()).st_size
        try:
            archive = zipfile.ZipFile(self._file)
            self._members = {}
            for info in archive.infolist():
                self._file.seek(info.header_offset)
                header = self._file.read(30)
                start = info.header_offset + 30 + int.from_bytes(header[26:28], "little")
                start += int.from_bytes(header[28:30], "little")
                if info.compress_type or start + info.file_size > size:
                    raise ValueError(f"{info.filename!r:.80} is compressed, or reaches beyond the file")
                self._members[info.filename.partition("/")[2]] = start, start + info.file_size
            start, stop = self._members["data.pkl"]
            self._file.seek(start)
            for name, value in run_pickle(self._file.read(min(stop - start, _MAX_PICKLE))).items():
                self._add(name, value)
        except _DAMAGE as error:
            raise self._error(f"{error}") from error
        return self.metadata, self.stored

    def _add(self, name: str, value: Record) -> None:
        """What a state dict has under `name`."""
        if value.name != _SUBCLASS:
            return self._add_tensor(name, value)
        attributes = {"dtype": _plain(value.args[2][1]), "shape": _plain(value.args[2][2])}
        for _ in _WRAPPED:
            attributes |= {key: _plain(each) for key, each in value.args[3].items()}
            if not (inner := [each for key, each in value.args[3].items() if key in _WRAPPED]):
                break
            if any(map(_is_tensor, value.args[3].values())):
                raise ValueError(f"{name} is a {value.args[1].name} with tensors beside its weight, which are not read")
            value = inner[0]
        parent, _, last = name.rpartition(".")
        for key, each in value.args[3].items():
            if _is_tensor(each):
                self._add_tensor(f"{parent}._{last}_{key}" if parent else f"_{last}_{key}", each)
        kind = value.args[1].name.rpartition(".")[2]
        self.metadata[name] = json.dumps({"_type": kind, "_data": attributes})
        return None

    def _add_tensor(self, name: str, value: Record) -> None:
        if not _is_tensor(value):
            raise ValueError(f"{name} is a {value.name!r:.80}, not a tensor")
        storage, offset, shape, stride, *more = value.args
        _, kind, key, _, _ = storage.args
        text = more[2].name if kind.name == "torch.storage.UntypedStorage" else kind.name
        found = getattr(torch, _OF_STORAGE.get(text, text.removeprefix("torch.").removesuffix("Storage").lower()))
        sizes = shape.args[0] if isinstance(shape, Record) else shape
        nbytes = nbytes_of(name, NAMES[found], list(sizes))
        dense = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        if any(size > 1 and at != wanted for size, at, wanted in zip(sizes, stride, dense, strict=True)):
            raise ValueError(f"{name} is a view that is not contiguous")
        start, stop = self._members[f"data/{key}"]
        begin = start + offset * found.itemsize
        if type(offset) is not int or not start <= begin <= begin + nbytes <= stop or name in self.stored:
            raise ValueError(f"{name} reaches beyond its data, or is there twice")
        self.stored[name] = Stored(found, tuple(sizes), begin, begin + nbytes)


_DAMAGE = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    zipfile.BadZipFile,
)

_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
"""Called with a function, the class, the arguments of the function (class, dtype, shape, ...), and the attributes."""

_WRAPPED = ("original_weight_tensor", "tensor_impl", "layout_tensor")
"""Attributes that hold a tensor with the codes; no more lie in each other."""


def _is_tensor(value: Any) -> bool:
    names = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
    return isinstance(value, Record) and value.name in names


def _plain(value: Any) -> Any:
    """An attribute as JSON data: a number, a text, integers, the value of an enumeration, the last name of a class or
    dtype; None for anything else."""
    if isinstance(value, Record):
        value = value.args[0] if value.args else value.name.rpartition(".")[2]
    if isinstance(value, tuple | list):
        return [each for each in value if type(each) is int]
    return value if isinstance(value, str | int | float) else None
