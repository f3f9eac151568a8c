"""The folder as a `Source`, so that `load_quantized` reads it without transformers.

Names are taken as they are stored, which are the names of the model in memory. Folders may be untrusted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ...checkpoint.source import Contents, Source, register_source
from ...checkpoint.tensor_file import TensorFile
from ...dtypes.serialize import from_canonical, scheme_of
from ...primitives.jsonable import parse_json
from .config import is_ours
from .names import METADATA, Index, is_marker

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SHARDS = f"{WEIGHTS}.index.json"

_MAX_JSON = 1 << 28
"""Size of a JSON file beyond which it is not read."""


@register_source
class TransformersFolder(Source):
    """A folder of `save_pretrained`, or one file of it that holds a whole model. There are no checksums to verify."""

    format = "transformers folder of qtorch"

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        try:
            if path.is_dir():
                return (path / CONFIG).is_file() and is_ours(_read_json(path / CONFIG))
            return path.suffix == ".safetensors" and METADATA in _metadata(path)
        except (OSError, ValueError):
            return False

    @classmethod
    def open(cls, path: Path, *, verify: bool, mmap: bool) -> TransformersFolder:
        files: list[TensorFile] = []
        try:
            files += map(TensorFile, _weight_files(path))
            return cls(path, files, mmap)
        except BaseException as error:
            for file in files:
                file.close()
            if isinstance(error, FileNotFoundError):
                raise ValueError(f"{path}: one of its files is missing: {error}") from error
            raise

    def __init__(self, path: Path, files: list[TensorFile], mmap: bool) -> None:
        self.path = path
        self.files = files
        self.mmap = mmap
        self.holders: dict[str, TensorFile] = {}
        for file in files:
            if again := file.stored.keys() & self.holders.keys():
                raise ValueError(f"{path}: {min(again)} is in more than one file")
            self.holders.update(dict.fromkeys(file.stored, file))
        self.index = Index()
        try:
            for file in files:
                self.index.add(Index.parse(file.metadata))
            self.plain = self._check_names()
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self.aliases = self.index.aliases
        self.names = self.plain | self.quantized | self.aliases.keys()

    @property
    def quantized(self) -> set[str]:
        return set(self.index.quantized)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def contents(self, name: str) -> Contents:
        entry = self.index.quantized.get(name)
        keys = [name] if entry is None else list(entry["tensors"].values())
        infos = [self.holders[key].stored[key] for key in keys]
        nbytes = sum(info.stop - info.start for info in infos)
        if entry is None:
            return Contents(infos[0].shape, infos[0].dtype, nbytes)
        try:
            scheme = scheme_of(entry)
        except ValueError as error:
            raise ValueError(f"{self.path}: {name}: {error}") from error
        return Contents(scheme.shape, scheme.dtype, nbytes, scheme)

    def tensor(self, name: str) -> Tensor:
        entry = self.index.quantized.get(name)
        if entry is None:
            return self._read(name)
        parts = {key: self._read(key) for key in entry["tensors"].values()}
        try:
            return from_canonical(entry, parts.pop)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}: {name}: {error}") from error

    def _read(self, key: str) -> Tensor:
        file = self.holders[key]
        read: Callable[[str], Tensor] = file.map if self.mmap else file.read
        return read(key)

    def _check_names(self) -> set[str]:
        """Check the names of the index against those of the files; the names of the tensors that are not quantized."""
        parts = self.index.owners().keys()
        if missing := sorted(parts - self.holders.keys()):
            raise ValueError(f"missing key {', '.join(missing[:4])}")
        for name in self.quantized & self.holders.keys():
            if name not in parts and not is_marker(self.holders[name].stored[name].shape):
                raise ValueError(f"{name} is stored both quantized and in floating point")
        plain = self.holders.keys() - parts - self.quantized
        for name, of in self.index.aliases.items():
            if name in plain | self.quantized or of not in plain | self.quantized:
                raise ValueError(f"{name} is another name of {of!r:.80}, but is stored itself, or that is not")
        return plain


def _weight_files(path: Path) -> list[Path]:
    """The files with weights; the index of the shards must not name files elsewhere.

    Raises:
        ValueError: there are none, or the index is not valid.
    """
    if not path.is_dir():
        return [path]
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if not (path / SHARDS).is_file():
        raise ValueError(f"{path}: has neither {WEIGHTS} nor {SHARDS}")
    shards = _read_json(path / SHARDS)
    names: Any = shards.get("weight_map") if isinstance(shards, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{path / SHARDS}: has no object 'weight_map' of names of files")
    for name in (files := sorted(set(names.values()))):
        if os.path.basename(name) != name or "\0" in name or not name.endswith(".safetensors"):
            raise ValueError(f"{path / SHARDS}: {name!r:.80} is not the name of a safetensors file in its folder")
    return [path / name for name in files]


def _read_json(path: Path) -> Any:
    if path.stat().st_size > _MAX_JSON:
        raise ValueError(f"{path}: is larger than {_MAX_JSON:,} bytes")
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from error


def _metadata(path: Path) -> dict[str, str]:
    file = TensorFile(path)
    file.close()
    return file.metadata
