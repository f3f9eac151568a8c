"""Progress: what is left of a calibration that was interrupted.

    <folder>/journal.json                  fingerprint, and what was made in the units that are done
    <folder>/unit-00003.safetensors        the new weights of a unit, in the own format
    <folder>/quantized-00003.safetensors   outputs of a block of the model as quantized so far, and of the float model
    <folder>/float-00003.safetensors       (both: the float stream is never computed anew from quantized blocks)
    <folder>/lock                          held by the process that calibrates

The journal is replaced when what it describes is on disk. Everything else in the folder is overwritten or removed by
whoever continues, so a process may die at any moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from ..checkpoint.journal import lock, read_journal, write_journal
from ..checkpoint.qtorch_source import QtorchSource
from ..checkpoint.save import save_quantized
from .kept import InMemory, Kept, OnDisk

M = TypeVar("M")

VERSION = 1


class Progress(Generic[M]):
    """Progress that is lost with the process.

    Attributes:
        done: number of units that are done.
    """

    done: int = 0

    def __enter__(self) -> Progress[M]:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stream(self, name: str) -> Kept:
        """Where the stream of this name keeps its outputs."""
        return InMemory()

    def load(self, unit: int) -> Mapping[str, M]:
        """What was made in a unit that is done, by the name of the weight."""
        raise NotImplementedError

    def finish(self, unit: int, units: int, made: Mapping[str, M]) -> Mapping[str, M]:
        """Take note that a unit, of `units`, is done; returns what was made of it, as `load` would."""
        return made


class Resumable(Progress[M]):
    """Progress in a folder; a context manager that holds its lock.

    Args:
        folder: made if there is none; its parent exists.
        fingerprint: part (weights, data, ...) -> text that differs if that part does.
        encode: what was made -> (the weight, JSON data).
        decode: the inverse.
        anew: begin anew, instead of an error, if the folder holds the progress of something else.

    Attributes:
        complete: all units are done.

    Raises:
        FileNotFoundError: there is no folder for `folder`.
        BlockingIOError: another process uses the folder.
        ValueError: the folder holds the progress of something else.
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
        self.folder, self.fingerprint = folder, {**fingerprint, "version of qtorch": _version()}
        self.encode, self.decode = encode, decode
        self._sources: dict[int, QtorchSource] = {}
        if not folder.absolute().parent.is_dir():
            raise FileNotFoundError(f"resume: there is no folder {folder.absolute().parent}")
        folder.mkdir(exist_ok=True)
        self._lock = lock(folder / "lock", folder)
        try:
            self.rows = self._read()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Resumable[M]:
        return self

    def __exit__(self, *error: object) -> None:
        for source in self._sources.values():
            source.close()
        os.close(self._lock)

    @property
    def done(self) -> int:  # type: ignore[override]
        return len(self.rows)

    @property
    def _journal(self) -> Path:
        return self.folder / "journal.json"

    def _read(self) -> list[dict[str, Any]]:
        journal = read_journal(self._journal)
        self.complete = False
        if journal is None:
            if others := sorted(path.name for path in self.folder.iterdir() if not _is_ours(path.name)):
                raise ValueError(
                    f"resume: {self.folder} holds other files ({', '.join(others[:4])}); name a new folder"
                )
            return []
        theirs = journal.get("fingerprint", {})
        if self.anew and (journal.get("version") != VERSION or theirs != self.fingerprint):
            self._journal.unlink()
            return []
        if journal.get("version") != VERSION or theirs != self.fingerprint:
            differs = [part for part, text in self.fingerprint.items() if theirs.get(part) != text] or ["format"]
            raise ValueError(
                f"resume: {self.folder} holds a calibration that differs in its {' and '.join(differs)}; give what it "
                "was begun with, name a new folder, or remove this one to start anew"
            )
        rows: list[dict[str, Any]] = journal["units"]
        self.complete = journal["complete"]
        return rows

    def stream(self, name: str) -> Kept:
        return OnDisk(self.folder, name)

    def made(self, name: str) -> M:
        """What was made of one weight."""
        unit = next(index for index, rows in enumerate(self.rows) if name in rows)
        if unit not in self._sources:
            self._sources[unit] = QtorchSource.open(self._path(unit), verify=True, mmap=False)
        return self.decode(self._sources[unit].tensor(name), self.rows[unit][name])

    def _path(self, unit: int) -> Path:
        return self.folder / f"unit-{unit:05d}.safetensors"

    def load(self, unit: int) -> dict[str, M]:
        rows = self.rows[unit]
        if not rows:
            return {}
        with QtorchSource.open(self._path(unit), verify=True, mmap=False) as source:
            return {name: self.decode(source.tensor(name), row) for name, row in rows.items()}

    def finish(self, unit: int, units: int, made: Mapping[str, M]) -> dict[str, M]:
        encoded = {name: self.encode(value) for name, value in made.items()}
        if encoded:
            save_quantized({name: weight for name, (weight, _) in encoded.items()}, self._path(unit))
        rows = [*self.rows, {name: row for name, (_, row) in encoded.items()}]
        self.complete = len(rows) == units
        write_journal(
            self._journal,
            {"version": VERSION, "fingerprint": self.fingerprint, "complete": self.complete, "units": rows},
        )
        self.rows = rows
        # As a process that continues would have it, whatever the form of what was made.
        return self.load(unit)


def _version() -> str:
    try:
        return version("qtorch")
    except PackageNotFoundError:
        return "unknown"


def _is_ours(name: str) -> bool:
    return name in ("lock", "journal.new") or name.startswith(("unit-", "quantized-", "float-", ".unit-"))
