"""Opening what is to be rewritten, and what identifies it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..checkpoint.folder_source import FloatFolder, look
from ..checkpoint.hf_folder import CONFIG, SUFFIX, read_object
from ..checkpoint.qtorch_source import QtorchSource
from ..checkpoint.source import SOURCES, Source, open_source


def open_any(path: Path) -> Source:
    """`open_source`, which also takes a safetensors file, or its index, of plain tensors.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: no format recognizes it, or it is damaged.
    """
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
