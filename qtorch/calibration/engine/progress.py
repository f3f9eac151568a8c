"""Progress: what is left of a calibration that was interrupted.

    <folder>/journal.json                  fingerprint, and what was made in the units that are done
    <folder>/unit-00003.safetensors        the new weights of a unit, in the own format
    <folder>/quantized-00003.safetensors   outputs of a block of the model as quantized so far, and of the float model
    <folder>/float-00003.safetensors       (both: the float stream is never computed anew from quantized blocks)
    <folder>/lock                          held by the process that calibrates

The journal is replaced when what it describes is on disk. Everything else in the folder is overwritten or removed by
whoever continues, so a process may die at any moment. What is damaged, or was made by somebody else, is found by
checksums and by its form, and all is begun anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from ...checkpoint import part_file
from ...checkpoint.part_file import Damaged, clear_folder, read_journal, write_journal
from ...checkpoint.save import save_quantized
from ...checkpoint.sources import QtorchSource
from .streams import OnDisk, OutputStore

M = TypeVar("M")
R = TypeVar("R")

VERSION = 2

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


class Resumable(Progress[M]):
    """Progress in a folder, which is made if there is none; a context manager that holds its lock.

    `fingerprint` has for each part (weights, data, ...) a text that differs if that part does. `encode` makes of what
    was made (the weight, JSON data), and `decode` is the inverse. A folder that holds the progress of something else is
    an error, or with `anew` begun anew. `complete` says that all units are done.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Mapping[str, str],
        encode: Callable[[M], tuple[Tensor, Any]],
        decode: Callable[[Tensor, Any], M],
        *,
        anew: bool = False,
    ) -> None:
        self.anew = anew
        self.folder, self._journal = folder, folder / part_file.JOURNAL
        self.fingerprint = {**fingerprint, "version of qtorch": _version()}
        self.encode, self.decode = encode, decode
        self._sources: dict[int, QtorchSource] = {}
        if not folder.absolute().parent.is_dir():
            raise FileNotFoundError(f"resume: there is no folder {folder.absolute().parent}")
        part_file.own_folder(folder)
        self._lock = part_file.lock(folder / _LOCK, folder)
        try:
            if others := sorted(path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name)):
                raise ValueError(f"resume: {folder} holds other files ({', '.join(others[:4])}); name a new folder")
            try:
                self.rows = self._read()
            except Damaged as error:
                self._clear(error)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Resumable[M]:
        return self

    def __exit__(self, *error: object) -> None:
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
        self.rows, self.complete = [], False

    @property
    def done(self) -> int:  # type: ignore[override]
        return len(self.rows)

    def _read(self) -> list[dict[str, Any]]:
        self.complete = False
        journal = read_journal(self._journal)
        if journal is None:
            return []
        theirs = journal.get("fingerprint")
        theirs = theirs if isinstance(theirs, dict) else {}
        if journal.get("version") != VERSION or theirs != self.fingerprint:
            if self.anew:
                clear_folder(self.folder, keep=_LOCK)
                return []
            differs = [part for part, text in self.fingerprint.items() if theirs.get(part) != text] or ["format"]
            raise ValueError(
                f"resume: {self.folder} holds a calibration that differs in its {' and '.join(differs)}; give what it "
                "was begun with, name a new folder, or remove this one to start anew"
            )
        rows, complete = journal.get("units"), journal.get("complete")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or type(complete) is not bool:
            raise Damaged(f"{self._journal}: it has no rows of units")
        self.complete = complete
        return rows

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
            if unit not in self._sources:
                self._sources[unit] = QtorchSource.open(self._path(unit), verify=True, mmap=False)
            source = self._sources[unit]
            if name not in source.names - source.aliases.keys():
                raise ValueError(f"{source.path}: it has no {name}")
            return self.decode(source.tensor(name), self.rows[unit][name])
        except (OSError, ValueError) as error:
            raise Damaged(str(error)) from error

    def _path(self, unit: int) -> Path:
        return self.folder / f"unit-{unit:05d}.safetensors"

    def finish(self, unit: int, units: int, made: Mapping[str, M]) -> dict[str, M]:
        encoded = {name: self.encode(value) for name, value in made.items()}
        if encoded:
            save_quantized({name: weight for name, (weight, _) in encoded.items()}, self._path(unit))
        rows = [*self.rows, {name: row for name, (_, row) in encoded.items()}]
        self.complete = len(rows) == units
        journal = {"version": VERSION, "fingerprint": self.fingerprint, "complete": self.complete, "units": rows}
        write_journal(self._journal, journal)
        self.rows = rows
        # As a process that continues would have it, whatever the form of what was made.
        return self.load(unit)


def _version() -> str:
    try:
        return version("qtorch")
    except PackageNotFoundError:
        return "unknown"
