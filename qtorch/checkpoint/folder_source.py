"""FolderSource: what the formats of other packages that store tensors in safetensors have in common.

A format says which weights are stored quantized, as `StoredWeight`s; every other tensor is plain. `FloatFolder` is the
format without quantized weights.
"""

from __future__ import annotations

import functools
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..dtypes.matrix_weight import type_of_scheme
from ..primitives.files import naming
from ..primitives.spec import Scheme
from .header import HEADER
from .hf_folder import CONFIG, HFFolder, find_root
from .sources import SOURCES, Contents, Source, register_source

Parts = tuple[Tensor, dict[str, Tensor]]
"""Codes, and the other tensors of a quantized tensor by the names of `QuantizedTensor.canonical`."""


class StoredWeight(NamedTuple):
    """A weight that is stored quantized: the stored names that it is made of, its scheme, and what reads the codes,
    unpacked, and the other tensors. Reading raises `ValueError` if they are damaged or cannot be represented
    exactly."""

    tensors: tuple[str, ...]
    scheme: Scheme
    read: Callable[[], Parts]


class FolderSource(Source):
    """A folder of transformers, or one of its safetensors files: the open `folder`, and the weights that are stored
    quantized by the name of the parameter.

    A format is recognized by `methods`, the `quant_method`s of config.json; where config.json says nothing, by
    `settings`, the name of a file, and by `marks`, a regular expression that a stored name matches.
    """

    methods: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[str] = ""
    marks: ClassVar[str] = ""

    def __init__(self, folder: HFFolder, *, mmap: bool = False) -> None:
        self.path = folder.path
        self.folder = folder
        self.mmap = mmap
        self.weights: Mapping[str, StoredWeight] = self.find_weights()
        used = {stored for weight in self.weights.values() for stored in weight.tensors} | self.ignored()
        plain = folder.stored.keys() - used
        if twice := sorted(plain & self.weights.keys()):
            raise ValueError(f"{self.path}: {twice[0]} is stored quantized and in floating point")
        self.names = plain | self.weights.keys()

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        seen = look(path)
        return seen is not None and not seen.is_own and cls.matches(seen)

    @classmethod
    def matches(cls, seen: Seen) -> bool:
        """Whether a folder, or a file, is of this format: by its `quant_method`, else by `settings` and `marks`."""
        if seen.method or not (cls.settings or cls.marks):
            return seen.method in cls.methods
        has_mark = not cls.marks or any(re.search(cls.marks, name) for name in seen.names)
        return has_mark and (not cls.settings or cls.settings in seen.files)

    @classmethod
    def open(cls, path: Path, *, verify: bool = True, mmap: bool = False) -> Source:
        return HFFolder.opened(path, lambda folder: cls(folder, mmap=mmap))

    @abstractmethod
    def find_weights(self) -> dict[str, StoredWeight]:
        """The weights of `self.folder` that are stored quantized; reads headers, not data."""

    def config(self) -> Mapping[str, Any]:
        """How the weights are quantized, from config.json or else `settings`."""
        return self.folder.quantization_config or (self.folder.json(self.settings) if self.settings else None) or {}

    def ignored(self) -> set[str]:
        """Stored tensors that are no parameters of the model, such as scales of activations."""
        return set()

    def optional(self) -> Set[str]:
        """Biases of quantized weights that are zero; some packages store one for every layer."""
        biases = {f"{name.rpartition('.')[0]}.bias" for name in self.weights} & self.folder.stored.keys()
        return {name for name in biases if not self.folder.read(name).any()}

    def contents(self, name: str) -> Contents:
        weight = self.weights.get(name)
        if weight is None:
            stored = self.folder.stored[name]
            return Contents(stored.shape, stored.dtype, self.folder.nbytes(name))
        nbytes = sum(map(self.folder.nbytes, weight.tensors))
        return Contents(weight.scheme.shape, weight.scheme.dtype, nbytes, weight.scheme)

    def tensor(self, name: str) -> Tensor:
        weight = self.weights.get(name)
        if weight is None:
            return self.folder.read(name, mmap=self.mmap)
        with naming(self.folder.file_of(weight.tensors[0]), name):
            codes, others = weight.read()
            scheme = self.scheme_of(weight, others)
            return type_of_scheme(scheme).from_canonical(codes, others, scheme)

    def scheme_of(self, weight: StoredWeight, others: Mapping[str, Tensor]) -> Scheme:
        """The scheme of a weight when these tensors of it have been read."""
        return weight.scheme

    def close(self) -> None:
        self.folder.close()

    def dtype_of(self, scale: torch.dtype) -> torch.dtype:
        """Logical dtype of a weight: that of config.json, else that of the scale if it has 16 bits, else bfloat16."""
        return self.folder.dtype or (scale if scale.itemsize == 2 else torch.bfloat16)


@register_source
class FloatFolder(FolderSource):
    """A folder whose tensors are all plain: a model of transformers that is not quantized."""

    format = "transformers"

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        # Any folder that no other format recognizes: `open` says what is wrong with it. A single file is left to the
        # own format, unless it is opened by this class.
        seen = look(path)
        return seen is not None and seen.is_folder

    @classmethod
    def open(cls, path: Path, *, verify: bool = True, mmap: bool = False) -> Source:
        seen = look(path)
        if seen is not None and seen.method is not None:
            known = sorted(method for kind in SOURCES if issubclass(kind, FolderSource) for method in kind.methods)
            raise ValueError(f"{path / CONFIG}: quant_method is {seen.method!r:.80}; known: {', '.join(known)}")
        if seen is not None and seen.is_own:
            raise ValueError(f"{path}: holds a checkpoint of save_quantized; open its file {find_root(path)}")
        return super().open(path, verify=verify, mmap=mmap)

    def find_weights(self) -> dict[str, StoredWeight]:
        return {}


class Seen(NamedTuple):
    """What formats are recognized by: the `quant_method` of config.json ("" if the weights are quantized without one,
    None if they are not), the names of the stored tensors, the metadata of the files, and the names of JSON files. The
    path is a folder or a file, and the file may be one of `save_quantized` (`is_own`)."""

    is_folder: bool
    is_own: bool
    method: str | None
    names: Set[str]
    metadata: Mapping[str, str]
    files: Set[str]


def look(path: Path) -> Seen | None:
    """What formats are recognized by, read from headers; None if `path` has no safetensors, or is a damaged file."""
    root = find_root(path)
    if root is None:
        return None
    watched = sorted(path.glob("*.json")) if path.is_dir() else [path.parent / CONFIG]
    times = tuple((file, file.stat().st_mtime_ns) for file in [root, *watched] if file.is_file())
    return _look(path, times)


@functools.lru_cache(maxsize=4)
def _look(path: Path, times: tuple[tuple[Path, int], ...]) -> Seen | None:
    """`look`, remembered while the files stay: every format asks."""
    try:
        with HFFolder(path) as folder:
            config = folder.quantization_config
            method = config.get("quant_method", "")
            found = str(getattr(method, "value", method)) if config else None
            files = {file.name for file, _ in times if file.suffix == ".json"}
            is_own = HEADER in folder.metadata
            return Seen(path.is_dir(), is_own, found, folder.stored.keys(), folder.metadata, files)
    except (ValueError, FileNotFoundError):
        if path.is_dir():
            raise
        return None
