"""Partial: an unfinished checkpoint in a folder beside its target, with a journal from which another process continues.

    .<name>.partial/journal.json     arguments, files and progress, replaced in one step
    .<name>.partial/files/           the files under construction
    .<name>.partial/lock             held by the process that writes

The journal is written when the data that it describes are on disk, often enough that little work is lost and seldom
enough that writing it takes no time. What follows in the files is cut off by whoever continues, who trusts neither:
names of files are not read from the journal, links are not followed, and what is stored has to match its checksums.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from ...model.report import CalibrationReport, LayerReport
from ...primitives.files import Closable
from ...primitives.jsonable import construct
from .. import part_file
from ..hf_folder import CONFIG, SUFFIX, FloatFolder, look, read_object
from ..part_file import JOURNAL, Damaged, PartFile, read_journal
from ..sources import SOURCES, QtorchSource, Source, open_source
from .forms import Form, file_name

JOURNAL_BYTES = 1 << 26
"""Bytes of data after which the journal is written, or more if it is long itself."""

_DATA_PER_JOURNAL = 16
_VERSION = 2
_FILES, _LOCK = "files", "lock"


class Partial(Closable):
    """The unfinished checkpoint of the file or folder `target`; a context manager that holds the lock.

    A folder that was begun with other `arguments`, which are JSON data, is started anew, and so is one that is damaged.
    Of the parameters, in the order of `names`, those that are stored have become so many tensors (`counts`).
    """

    def __init__(self, target: Path, arguments: Any, form: Form, names: Sequence[str], limit: int) -> None:
        self.target, self.arguments, self.form, self.names, self.limit = target, arguments, form, names, limit
        self.folder = folder_of(target)
        self.counts: list[int] = []
        self.rows: list[LayerReport] = []
        self.files: list[PartFile] = []
        self._stored: set[str] = set()
        self._since_journal = self._journal_size = 0
        part_file.own_folder(self.folder)
        self._lock = part_file.lock(self.folder / _LOCK, target)
        with self.closed_by_errors():
            self._begin()

    def close(self) -> None:
        for file in self.files:
            file.close()
        os.close(self._lock)

    @property
    def done(self) -> int:
        """Number of parameters that are stored."""
        return len(self.counts)

    def _begin(self) -> None:
        try:
            journal = read_journal(self.folder / JOURNAL)
            if journal is not None and _is_of(journal, self.arguments):
                self._continue(journal)
                return
        except Damaged as error:
            part_file.say_anew(self.target, error)
        for file in self.files:
            file.close()
        self.files, self._stored = [], set()
        part_file.clear_folder(self.folder, keep=_LOCK)
        (self.folder / _FILES).mkdir()

    def _continue(self, journal: Any) -> None:
        counts, rows = _counts_and_rows(journal, self.names)
        folder, files = self.folder / _FILES, journal.get("files")
        if not isinstance(files, list):
            raise Damaged(f"{self.folder / JOURNAL}: it names no files")
        if not folder.is_dir() or folder.is_symlink() or any(path.is_symlink() for path in folder.rglob("*")):
            raise Damaged(f"{folder}: it is missing, or has links in it")
        moved = self.form.places(len(files), self.target, folder) if len(counts) == len(self.names) else None
        for index, data in enumerate(files):
            place = None if moved is None else moved[index]
            self.files.append(PartFile.from_json(folder / file_name(index), data, place))
        stored = [tensor.name for file in self.files for tensor in file.written]
        self._stored = set(stored)
        if len(self._stored) != len(stored) or len(stored) != sum(counts):
            raise Damaged(f"{self.folder / JOURNAL}: its tensors are not those of its parameters")
        try:
            self.form.resume(journal.get("form"), self.names[: len(counts) + 1], stored)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{self.folder / JOURNAL}: {error}") from error
        self.counts, self.rows = counts, rows

    def add(self, name: str, tensor: Tensor, row: LayerReport | None = None) -> int:
        """Store the next parameter; returns its size in the file."""
        stored = self.form.store(name, tensor.detach())
        if clash := stored.keys() & self._stored:
            raise ValueError(f"two tensors would be stored as {', '.join(sorted(clash))}")
        self._stored |= stored.keys()
        size = sum(value.nbytes for value in stored.values())
        if not self.files or (self.files[-1].nbytes and self.files[-1].nbytes + size > self.limit):
            self._next_file()
        for key, value in stored.items():
            self.files[-1].write(key, value.detach().resolve_conj().resolve_neg().cpu().contiguous())
        self.counts.append(len(stored))
        if row is not None:
            self.rows.append(row)
        self._since_journal += size
        if self._since_journal >= max(JOURNAL_BYTES, _DATA_PER_JOURNAL * self._journal_size):
            self.write_journal()
        return size

    def _next_file(self) -> None:
        if self.files:
            self.write_journal()
            self.form.finish_file(self.files[-1])
        room = self.form.room(self.names[self.done :], is_first=not self.files)
        self.files.append(PartFile(self.folder / _FILES / file_name(len(self.files)), room))

    def write_journal(self) -> None:
        """Flush the files, then replace the journal."""
        for file in self.files[:1] + self.files[-1:]:
            if not file.is_finished:
                file.sync()
        data = {
            "version": _VERSION,
            "arguments": self.arguments,
            "counts": self.counts,
            "rows": [asdict(row) for row in self.rows],
            "files": [file.to_json() for file in self.files],
            "form": self.form.progress(),
        }
        self._journal_size = part_file.write_journal(self.folder / JOURNAL, data)
        self._since_journal = 0

    def finish(self) -> None:
        """Move the complete checkpoint to its target, and remove the folder."""
        if not self.files and (self.folder / _FILES).exists():
            self._next_file()
        self.write_journal()
        if self.files:
            self.form.finish(self.files, self.target)
        _remove(self.folder)


def _remove(folder: Path) -> None:
    """The journal goes last: where a process is killed meanwhile, it says what the rest of the folder is."""
    shutil.rmtree(folder / _FILES, ignore_errors=True)
    (folder / _LOCK).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def folder_of(target: Path) -> Path:
    """The folder of the unfinished checkpoint of `target`."""
    return target.with_name(f".{target.name}.partial")


def take_left_over(target: Path, arguments: Any, names: Sequence[str]) -> list[LayerReport] | None:
    """Remove the folder of a process that died after `target` was complete: the reports in its journal. None if there
    is no such folder, or it is of something else."""
    try:
        journal = read_journal(folder_of(target) / JOURNAL)
        if journal is None or not _is_of(journal, arguments):
            return None
        counts, rows = _counts_and_rows(journal, names)
    except Damaged:
        return None
    if len(counts) < len(names):
        return None
    _remove(folder_of(target))
    return rows


def _is_of(journal: Any, arguments: Any) -> bool:
    return bool(journal.get("arguments") == arguments and journal.get("version") == _VERSION)


def _counts_and_rows(journal: Any, names: Sequence[str]) -> tuple[list[int], list[LayerReport]]:
    """What a journal says of the parameters that are stored, which must be the first of `names`."""
    counts, rows = journal.get("counts"), journal.get("rows")
    if not isinstance(counts, list) or len(counts) > len(names) or not all(type(n) is int and n >= 0 for n in counts):
        raise Damaged("its journal has no numbers of tensors")
    try:
        made = [_row(row) for row in rows]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"its journal has a row that is no report: {error}") from error
    if {row.name for row in made} - set(names[: len(counts)]):
        raise Damaged("its journal has reports on what is not stored")
    return counts, made


def _row(data: Any) -> LayerReport:
    if data["calibration"] is not None:
        data = {**data, "calibration": construct(CalibrationReport, data["calibration"])}
    return construct(LayerReport, data)


def open_any(path: Path) -> Source:
    """`open_source`, which also takes a safetensors file, or its index, of plain tensors."""
    if os.path.exists(path) and not path.is_dir():
        kind = next((kind for kind in SOURCES if kind.recognizes(path)), None)
        seen = look(path) if kind is QtorchSource else None
        if seen is not None and not seen.is_own:
            return FloatFolder.open(path)
    return open_source(path)


def model_config(path: Path) -> dict[str, Any]:
    """The contents of config.json of the folder, or of the folder that the file is in; empty without."""
    return read_object((path if path.is_dir() else path.parent) / CONFIG) or {}


def identity_of(path: Path) -> list[list[Any]]:
    """JSON data that differs when the checkpoint has changed: name, size and time of every file with weights."""
    files = [path] if not path.is_dir() else [*path.glob(f"*{SUFFIX}"), *path.glob("*.json"), *path.glob("*.gguf")]
    found = []
    for file in sorted(file for file in files if file.is_file()):
        status = file.stat()
        found.append([file.name, status.st_size, status.st_mtime_ns])
    return found
