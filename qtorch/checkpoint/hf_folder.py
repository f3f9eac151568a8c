"""A folder of transformers: config.json, and tensors in one safetensors file or in the shards that an index names.

    config.json                          optional; says by `quantization_config` how the weights are quantized
    model.safetensors                    or any other single *.safetensors
    model.safetensors.index.json         {"weight_map": {tensor: file}, ...}, with the files that it names beside it

The files may be untrusted: an index names files of its own folder only, every header is validated by `TensorFile`, and
a tensor that two files hold, or that is missing from its file, is an error. Nothing of this depends on transformers.

`FolderSource` is what the formats of other packages in such folders have in common: a format says which weights are
stored quantized, as `StoredWeight`s; every other tensor is plain. `FloatFolder` is the format without quantized ones.
"""

from __future__ import annotations

import functools
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from ..dtypes.matrix_weight import type_of_scheme
from ..primitives.files import Closable, naming, read_json
from ..primitives.spec import Scheme
from .header import HEADER, is_file_name
from .sources import SOURCES, Contents, Source, register_source
from .tensor_file import Stored, TensorFile

CONFIG = "config.json"
INDEX_SUFFIX = ".safetensors.index.json"
SUFFIX = ".safetensors"

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
"""Dtypes that a configuration may name as those of the model."""


T = TypeVar("T")


class HFFolder(Closable):
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
        with self.closed_by_errors():
            if root.name.endswith(".json"):
                self._open_shards(root)
            else:
                self._open(root)
        self.stored: Mapping[str, Stored] = {name: file.stored[name] for name, file in self._owners.items()}

    @classmethod
    def opened(cls, path: Path, make: Callable[[HFFolder], T], **files: Any) -> T:
        """What `make` makes of the open folder, which is closed after an error."""
        folder = cls(path, **files)
        with folder.closed_by_errors():
            return make(folder)

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

    def read(self, name: str, *, mmap: bool = False) -> torch.Tensor:
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


Parts = tuple[torch.Tensor, dict[str, torch.Tensor]]
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
    `settings`, the name of a file, and by `marks`, a regular expression that a stored name matches. `left_out` are the
    ends of the names of tensors that are no parameters.
    """

    methods: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[str] = ""
    marks: ClassVar[str] = ""
    left_out: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: HFFolder, *, mmap: bool = False) -> None:
        self.path, self.folder, self.mmap = folder.path, folder, mmap
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
        return {name for name in self.folder.stored if name.endswith(self.left_out)} if self.left_out else set()

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

    def tensor(self, name: str) -> torch.Tensor:
        weight = self.weights.get(name)
        if weight is None:
            return self.folder.read(name, mmap=self.mmap)
        with naming(self.folder.file_of(weight.tensors[0]), name):
            codes, others = weight.read()
            scheme = self.scheme_of(weight, others)
            return type_of_scheme(scheme).from_canonical(codes, others, scheme)

    def scheme_of(self, weight: StoredWeight, others: Mapping[str, torch.Tensor]) -> Scheme:
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
