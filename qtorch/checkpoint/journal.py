"""What lets a process continue the work of one that died: a JSON file replaced in one step, and a lock."""

from __future__ import annotations

import json
import os
import shutil
import stat
import warnings
import zlib
from pathlib import Path
from typing import Any

from ..files import read_json

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
    """The data of `write_journal`, None if there is no such file. It may be anybody's: a checksum is no signature.

    Raises:
        Damaged: it is no journal, or does not match its checksum.
    """
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
    """Make the folder if there is none; a link in its place, which leads elsewhere, is removed.

    Raises:
        FileExistsError: it is a file.
    """
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
    """An open file that only one process can have; closing it, or the end of the process, releases it.

    Args:
        path: made if there is none; what is not a regular file is removed.
        what: named in the error.

    Raises:
        BlockingIOError: another process has it.
    """
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
