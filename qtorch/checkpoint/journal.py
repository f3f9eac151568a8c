"""What lets a process continue the work of one that died: a JSON file replaced in one step, and a lock."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..primitives.jsonable import parse_json


def write_journal(path: Path, data: Any) -> int:
    """Replace the file in one step, when the data is on disk; the length of the text."""
    text = json.dumps(data)
    new = path.with_suffix(".new")
    with open(new, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    return len(text)


def read_journal(path: Path) -> Any:
    """The data of `write_journal`, None if there is no such file or it is damaged."""
    try:
        return parse_json(path.read_text(encoding="utf-8", errors="surrogatepass"))
    except (FileNotFoundError, ValueError):
        return None


def lock(path: Path, what: Path) -> int:
    """An open file that only one process can have; closing it, or the end of the process, releases it.

    Args:
        what: named in the error.

    Raises:
        BlockingIOError: another process has it.
    """
    number = os.open(path, os.O_RDWR | os.O_CREAT)
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
