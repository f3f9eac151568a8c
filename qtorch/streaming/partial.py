"""Partial: an unfinished checkpoint in a folder beside its target, with a journal from which another process continues.

    .<name>.partial/journal.json     arguments, files and progress, replaced in one step
    .<name>.partial/files/           the files under construction
    .<name>.partial/lock             held by the process that writes

The journal is written when the data that it describes are on disk, often enough that little work is lost and seldom
enough that writing it takes no time. What follows in the files is cut off by whoever continues.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.journal import lock, read_journal, write_journal
from ..checkpoint.part_file import PartFile
from .forms import Form, file_name

JOURNAL_BYTES = 1 << 26
"""Bytes of data after which the journal is written, or more if it is long itself."""

_DATA_PER_JOURNAL = 16
_VERSION = 1


class Partial:
    """The unfinished checkpoint of `target`; a context manager that holds the lock.

    Args:
        target: file or folder that the checkpoint becomes.
        arguments: JSON data. A folder that was begun with others is started anew.
        form: how it is written; it continues from the journal.
        names: of all parameters, in the order in which they are stored.
        limit: size of a file in bytes.

    Attributes:
        done: number of parameters that are stored.
        rows: JSON data that the caller has passed to `add`.

    Raises:
        BlockingIOError: another process writes this checkpoint.
    """

    def __init__(self, target: Path, arguments: Any, form: Form, names: Sequence[str], limit: int) -> None:
        self.target, self.arguments, self.form, self.names, self.limit = target, arguments, form, names, limit
        self.folder = folder_of(target)
        self.done = 0
        self.rows: list[Any] = []
        self.files: list[PartFile] = []
        self._stored: set[str] = set()
        self._since_journal = self._journal_size = 0
        self.folder.mkdir(exist_ok=True)
        self._lock = lock(self.folder / "lock", target)
        try:
            journal = read_journal(self.folder / "journal.json")
            if journal is not None and journal.get("arguments") == arguments and journal.get("version") == _VERSION:
                self._continue(journal)
            else:
                # In this order: without its files, no journal continues.
                (self.folder / "journal.json").unlink(missing_ok=True)
                shutil.rmtree(self.folder / "files", ignore_errors=True)
                (self.folder / "files").mkdir()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files:
            file.close()
        os.close(self._lock)

    def _continue(self, journal: Any) -> None:
        self.done, self.rows = journal["done"], journal["rows"]
        if (self.folder / "files").exists():
            self.files = [PartFile.from_json(self.folder / "files", data) for data in journal["files"]]
        self._stored = {tensor.name for file in self.files for tensor in file.written}
        self.form.resume(journal["form"])

    def add(self, name: str, tensor: Tensor, row: Any = None) -> int:
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
        self.done += 1
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
        self.files.append(PartFile(self.folder / "files" / file_name(len(self.files)), room))

    def write_journal(self) -> None:
        """Flush the files, then replace the journal."""
        for file in self.files[:1] + self.files[-1:]:
            if not file.is_finished:
                file.sync()
        data = {
            "version": _VERSION,
            "arguments": self.arguments,
            "done": self.done,
            "rows": self.rows,
            "files": [file.to_json() for file in self.files],
            "form": self.form.progress(),
        }
        self._journal_size = write_journal(self.folder / "journal.json", data)
        self._since_journal = 0

    def finish(self) -> None:
        """Move the complete checkpoint to its target, and remove the folder."""
        if not self.files and (self.folder / "files").exists():
            self._next_file()
        self.write_journal()
        if self.files:
            self.form.finish(self.files, self.target)
        shutil.rmtree(self.folder, ignore_errors=True)


def folder_of(target: Path) -> Path:
    """The folder of the unfinished checkpoint of `target`."""
    return target.with_name(f".{target.name}.partial")


def is_left_over(target: Path, arguments: Any) -> bool:
    """Whether a process died after `target` was complete, and before its folder was removed."""
    journal = read_journal(folder_of(target) / "journal.json")
    return journal is not None and journal.get("arguments") == arguments


def remove(target: Path) -> list[Any]:
    """Remove the folder that was left over; the rows in its journal."""
    rows: list[Any] = read_journal(folder_of(target) / "journal.json")["rows"]
    shutil.rmtree(folder_of(target), ignore_errors=True)
    return rows
