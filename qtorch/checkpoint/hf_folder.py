"""A folder of transformers: config.json, and tensors in one safetensors file or in the shards that an index names.

    config.json                          optional; says by `quantization_config` how the weights are quantized
    model.safetensors                    or any other single *.safetensors
    model.safetensors.index.json         {"weight_map": {tensor: file}, ...}, with the files that it names beside it

The files may be untrusted: an index names files of its own folder only, every header is validated by `TensorFile`, and
a tensor that two files hold, or that is missing from its file, is an error. Nothing of this depends on transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..primitives.files import naming, read_json
from .header import is_file_name
from .tensor_file import Stored, TensorFile

CONFIG = "config.json"
INDEX_SUFFIX = ".safetensors.index.json"
SUFFIX = ".safetensors"

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
"""Dtypes that a configuration may name as those of the model."""


T = TypeVar("T")


class HFFolder:
    """The open files of a folder, with validated headers; a context manager. It is opened by its path, its index, or
    one safetensors file, or of another kind by `opens`, which begins with `root`; the attribute `root` is the folder,
    and `config` the contents of config.json, empty if there is none. `metadata` are those of all files, of which a
    later one wins; `stored` has dtype, shape and place of every tensor."""

    def __init__(self, path: Path, root: Path | None = None, opens: type[TensorFile] = TensorFile) -> None:
        self.path = path
        self.root = path if path.is_dir() else path.parent
        self.config = self.json(CONFIG) or {}
        self.metadata: dict[str, str] = {}
        self.files: list[TensorFile] = []
        self._owners: dict[str, TensorFile] = {}
        self._opens = opens
        root = root or find_root(path)
        if root is None:
            raise FileNotFoundError(f"{path}: no {SUFFIX} file, or several without an index that names them")
        try:
            if root.name.endswith(".json"):
                self._open_shards(root)
            else:
                self._open(root)
        except BaseException:
            self.close()
            raise
        self.stored: Mapping[str, Stored] = {name: file.stored[name] for name, file in self._owners.items()}

    @classmethod
    def opened(cls, path: Path, make: Callable[[HFFolder], T], **files: Any) -> T:
        """What `make` makes of the open folder, which is closed after an error."""
        folder = cls(path, **files)
        try:
            return make(folder)
        except BaseException:
            folder.close()
            raise

    def __enter__(self) -> HFFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; mapped tensors stay valid."""
        for file in self.files:
            file.close()

    @property
    def quantization_config(self) -> Mapping[str, Any]:
        """How the weights are quantized, from config.json; empty if it does not say."""
        keys = ("quantization_config", "compression_config")
        found: Any = next((config[key] for config in self._configs() for key in keys if config.get(key)), {})
        if not isinstance(found, dict):
            raise ValueError(f"{self.root / CONFIG}: quantization_config is {found!r:.80}, not an object")
        return found

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the model by config.json, None if it names none."""
        names = [config.get(key) for config in self._configs() for key in ("dtype", "torch_dtype")]
        known = [DTYPES.get(name.removeprefix("torch.")) for name in names if isinstance(name, str)]
        return next((dtype for dtype in known if dtype is not None), None)

    def _configs(self) -> list[dict[str, Any]]:
        """config.json, and the part of it on the language model of a model of images and text."""
        of_text = self.config.get("text_config")
        return [self.config, of_text] if isinstance(of_text, dict) else [self.config]

    def nbytes(self, name: str) -> int:
        """Bytes that a tensor takes in its file."""
        stored = self.stored[name]
        return stored.stop - stored.start

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._owners[name].path

    def naming(self, stored: str, name: str = "") -> AbstractContextManager[None]:
        """`files.naming` with the file that holds the tensor `stored`, and with its name or another."""
        return naming(self.file_of(stored), name or stored)

    def read(self, name: str, *, mmap: bool = False) -> Tensor:
        """A tensor, read into memory or, with `mmap`, mapped from its file where it is aligned."""
        file = self._owners[name]
        return file.map(name) if mmap else file.read(name)

    def json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file of the folder, None if there is no such file."""
        return read_object(self.root / name)

    def _open(self, path: Path) -> None:
        file = self._opens(path)
        self.files.append(file)
        for name in file.stored:
            if name in self._owners:
                raise ValueError(f"{path}: {name} is in it and in {self._owners[name].path.name}")
            self._owners[name] = file
        self.metadata |= file.metadata

    def _open_shards(self, index: Path) -> None:
        weight_map = (read_object(index) or {}).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index}: it has no weight_map")
        for file in weight_map.values():
            if not isinstance(file, str) or not is_file_name(file):
                raise ValueError(f"{index}: {file!r:.80} is not the name of a file in its folder")
        for shard in sorted(set(weight_map.values())):
            try:
                self._open(self.root / shard)
            except FileNotFoundError as error:
                raise ValueError(f"{index}: its shard {shard} is missing") from error
        for name, shard in weight_map.items():
            owner = self._owners.get(name)
            if name not in self.metadata and (owner is None or owner.path.name != shard):
                raise ValueError(f"{index}: {name} is not in {shard}")


def find_root(path: Path) -> Path | None:
    """The index or the single safetensors file of a folder, `path` itself if it is one; None if there is neither."""
    if not path.is_dir():
        return path if path.is_file() and path.name.endswith((SUFFIX, INDEX_SUFFIX)) else None
    for pattern in (INDEX_SUFFIX, SUFFIX):
        named = path / f"model{pattern}"
        if named.is_file():
            return named
        found = sorted(path.glob(f"*{pattern}"))
        if len(found) == 1:
            return found[0]
    return None


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, which may be untrusted; None if there is no such file."""
    try:
        data = read_json(path)
    except FileNotFoundError:
        return None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: it holds a {type(data).__name__}, not an object")
    return data
