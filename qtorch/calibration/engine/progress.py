"""Progress: what is left of a calibration that was interrupted.

    <folder>/journal.json                  fingerprint; what the units that are done gave, checksums of their files
    <folder>/unit-00003.safetensors        the new weights of a unit, in the own format
    <folder>/quantized-00003.safetensors   outputs of a block of the model as quantized so far, and of the float model
    <folder>/float-00003.safetensors       (both: the float stream is never computed anew from quantized blocks)
    <folder>/lock                          held by the process that calibrates

The journal is replaced when what it describes is on disk. Everything else in the folder is overwritten or removed by
whoever continues, so a process may die at any moment. What is damaged, or was made by somebody else, is found by
checksums and by its form, and all is begun anew.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from ...checkpoint import part_file, save_load, sources, tensor_file
from ...checkpoint.part_file import Damaged, clear_folder, read_journal, write_journal
from ...dtypes import QuantizedTensor
from ...primitives.files import Closable
from ..data import Data
from .streams import OnDisk, OutputStore

M = TypeVar("M")
R = TypeVar("R")

VERSION = 3

_LOCK = "lock"
_OURS = re.compile(r"lock|journal\.(json|new)|\.?(unit|quantized|float)-\d{5}[-.].*")


class Progress(Generic[M]):
    """Progress that is lost with the process; so many units are `done`."""

    done: int = 0

    def run(self, work: Callable[[], R]) -> R:
        """``work()``, once more from the start where what an earlier process left turns out to be damaged."""
        return work()

    def stream(self, name: str) -> OutputStore:
        """Where the stream of this name keeps its outputs."""
        return OutputStore()

    def load(self, unit: int) -> Mapping[str, M]:
        """What was made in a unit that is done, by the name of the weight."""
        raise NotImplementedError

    def finish(self, unit: int, units: int, made: Mapping[str, M]) -> Mapping[str, M]:
        """Take note that a unit, of `units`, is done; returns what was made of it, as `load` would."""
        return made


class Resumable(Progress[M], Closable):
    """Progress in a folder, which is made if there is none; a context manager that holds its lock.

    `fingerprint` has for each part (weights, data, ...) a text that differs if that part does. `encode` makes of what
    was made (the weight, JSON data), and `decode` is the inverse. A folder that holds the progress of something else is
    an error, or with `anew` begun anew. `complete` says that all units are done.
    """

    def __init__(
        self, folder: Path, parts: Mapping[str, str], encode: Callable[[M], tuple[torch.Tensor, Any]],
        decode: Callable[[torch.Tensor, Any], M], *, anew: bool = False,
    ) -> None:  # fmt: skip
        self.anew = anew
        self.folder, self._journal = folder, folder / part_file.JOURNAL
        self.fingerprint = {**parts, "version of qtorch": _version()}
        self.encode, self.decode = encode, decode
        self._sources: dict[int, sources.QtorchSource] = {}
        if not folder.absolute().parent.is_dir():
            raise FileNotFoundError(f"resume: there is no folder {folder.absolute().parent}")
        part_file.own_folder(folder)
        self._lock = part_file.lock(folder / _LOCK, folder)
        with self.closed_by_errors():
            if others := sorted(path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name)):
                raise ValueError(f"resume: {folder} holds other files ({', '.join(others[:4])}); name a new folder")
            try:
                self.rows, self.checksums = self._read()
            except Damaged as error:
                self._clear(error)

    def close(self) -> None:
        self._close_sources()
        os.close(self._lock)

    def _close_sources(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources = {}

    def run(self, work: Callable[[], R]) -> R:
        try:
            return work()
        except Damaged as error:
            self._clear(error)
            return work()

    def _clear(self, error: Damaged) -> None:
        """Begin anew."""
        part_file.say_anew(self.folder, error)
        self._close_sources()
        clear_folder(self.folder, keep=_LOCK)
        self.rows, self.checksums, self.complete = [], [], False

    @property
    def done(self) -> int:  # type: ignore[override]
        return len(self.rows)

    def _read(self) -> tuple[list[dict[str, Any]], list[str | None]]:
        """For each unit that is done, what was made of its weights, by name, and the checksum of its file."""
        self.complete = False
        journal = read_journal(self._journal)
        if journal is None:
            return [], []
        theirs = journal.get("fingerprint")
        theirs = theirs if isinstance(theirs, dict) else {}
        if journal.get("version") != VERSION or theirs != self.fingerprint:
            if self.anew:
                clear_folder(self.folder, keep=_LOCK)
                return [], []
            differs = [part for part, text in self.fingerprint.items() if theirs.get(part) != text] or ["format"]
            raise ValueError(
                f"resume: {self.folder} holds a calibration that differs in its {' and '.join(differs)}; give what it "
                "was begun with, name a new folder, or remove this one to start anew"
            )
        rows, checksums, complete = journal.get("units"), journal.get("checksums"), journal.get("complete")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or type(complete) is not bool:
            raise Damaged(f"{self._journal}: it has no rows of units")
        if not isinstance(checksums, list) or len(checksums) != len(rows):
            raise Damaged(f"{self._journal}: it has no checksums of its files")
        self.complete = complete
        return rows, checksums

    def stream(self, name: str) -> OutputStore:
        return OnDisk(self.folder, name)

    def made(self, name: str) -> M:
        """What was made of one weight; `Damaged` if it is not there."""
        unit = next((index for index, rows in enumerate(self.rows) if name in rows), None)
        if unit is None:
            raise Damaged(f"{self._journal}: it has no row of {name}")
        return self._of_unit(unit, name)

    def load(self, unit: int) -> dict[str, M]:
        return {name: self._of_unit(unit, name) for name in self.rows[unit]}

    def _of_unit(self, unit: int, name: str) -> M:
        try:
            source = self._source(unit)
            if source.checksum != self.checksums[unit]:
                raise ValueError(f"{source.path}: it is another file than its journal describes")
            if name not in source.names - source.aliases.keys():
                raise ValueError(f"{source.path}: it has no {name}")
            return self.decode(source.tensor(name), self.rows[unit][name])
        except (OSError, ValueError) as error:
            raise Damaged(str(error)) from error

    def _source(self, unit: int) -> sources.QtorchSource:
        if unit not in self._sources:
            self._sources[unit] = sources.QtorchSource.open(self._path(unit), verify=True, mmap=False)
        return self._sources[unit]

    def _path(self, unit: int) -> Path:
        return self.folder / f"unit-{unit:05d}.safetensors"

    def finish(self, unit: int, units: int, made: Mapping[str, M]) -> dict[str, M]:
        encoded = {name: self.encode(value) for name, value in made.items()}
        checksum = None
        if encoded:
            save_load.save_quantized({name: weight for name, (weight, _) in encoded.items()}, self._path(unit))
            checksum = self._source(unit).checksum
        rows = [*self.rows, {name: row for name, (_, row) in encoded.items()}]
        checksums = [*self.checksums, checksum]
        self.complete = len(rows) == units
        journal = {"version": VERSION, "fingerprint": self.fingerprint, "complete": self.complete}
        write_journal(self._journal, {**journal, "units": rows, "checksums": checksums})
        self.rows, self.checksums = rows, checksums
        # As a process that continues would have it, whatever the form of what was made.
        return self.load(unit)


def _version() -> str:
    try:
        return version("qtorch")
    except PackageNotFoundError:
        return "unknown"


# Fingerprints: short texts that differ when the weights of a model, or the data, do.


def fingerprint(data: Any) -> str:
    """The fingerprint of JSON data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def fingerprint_of_weights(model: torch.nn.Module) -> str:
    """The fingerprint of all parameters and buffers, and of the class of the model."""
    tensors = {name: _of_tensor(tensor) for name, (_, _, tensor) in tensor_file.places_of(model)}
    return fingerprint([type(model).__qualname__, tensors])


def fingerprint_of_data(data: Data) -> str:
    """The fingerprint of batches, and of the names of the functions that use them."""
    functions = [
        f"{f.__module__}.{f.__qualname__}" if hasattr(f, "__qualname__") else type(f).__qualname__
        for f in (data.forward, data.mask)
        if f is not None
    ]
    batches = []
    for batch in data.batches:
        leaves, spec = torch.utils._pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        batches.append([str(spec), [_of_leaf(leaf) for leaf in leaves]])
    return fingerprint([functions, batches])


def _of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return ["tensor", _of_tensor(leaf)]
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    if type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype"):
        return ["array", _of_tensor(torch.as_tensor(leaf, device="cpu"))]
    raise ValueError(f"resume: a batch holds a {type(leaf).__name__}, want tensors, numbers and text")


def _of_tensor(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, QuantizedTensor):
        return [repr(tensor.scheme), {name: _of_tensor(inner) for name, inner in tensor.inner_tensors.items()}]
    if tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        return "no values"
    return tensor_file.checksum(tensor.detach().cpu())
