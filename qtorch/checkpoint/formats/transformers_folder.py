"""Folders that transformers' `save_pretrained` writes for a quantized model; `transformers` is not imported.

    config.json                      `quantization_config` has the `quant_method` "qtorch"
    model.safetensors                or shards that model.safetensors.index.json names
        <name>_codes, <name>_packed, <name>_scale, ...    the parts of a quantized tensor, see `stored`
        <name>                       an empty tensor, the marker of a quantized tensor
        metadata "qtorch.transformers"                    see `Index`

The names of parts are those of `dtypes.serialize`, with two differences. Codes of 8 bits are called ``<name>_codes``:
under the bare name, transformers would split the codes of fused experts as it splits their float weights. And the bare
name holds a *marker*, a tensor of shape (0,): a reader that does not know the format finds a tensor of a wrong shape,
and fails, instead of initializing the weight at random.

As a `Source` it is read without transformers, by the names that are stored. Folders may be untrusted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ...dtypes import QuantizedTensor, serialize
from ...primitives.files import naming, parse_json
from ...primitives.jsonable import from_json, to_json
from .. import header, save_folder, sources, tensor_file
from ..hf_folder import CONFIG, SUFFIX, HFFolder, find_root, read_object

METADATA = "qtorch.transformers"
"""Metadata key of every file that holds a quantized tensor; its value is JSON text."""

NAMES_VERSION = 1


def stored(name: str, tensor: QuantizedTensor) -> tuple[dict[str, torch.Tensor], serialize.Entry]:
    """The plain tensors that stand for a quantized parameter, by stored name, and its entry in the `Index`."""
    tensors, entry = serialize.to_canonical(name, tensor)
    codes = f"{name}_codes"
    renamed = {codes if key == name else key: value for key, value in tensors.items()}
    parts = {part: codes if key == name else key for part, key in entry["tensors"].items()}
    return {name: marker(), **renamed}, {**entry, "tensors": parts}


def marker() -> torch.Tensor:
    """An empty tensor with memory of its own: packages that look for shared tensors compare addresses."""
    return torch.empty(1, dtype=torch.uint8, device="cpu")[:0]


def is_marker(shape: Iterable[int]) -> bool:
    """Whether a stored tensor of this shape is a marker."""
    return tuple(shape) == (0,)


def cast(tensor: QuantizedTensor, dtype: torch.dtype | None) -> QuantizedTensor:
    """The tensor with the logical dtype `dtype`, and the same codes; unchanged if quantized tensors do not have it."""
    if dtype not in serialize.LOGICAL_DTYPES or dtype == tensor.scheme.dtype:
        return tensor
    made = tensor.to(dtype)
    assert isinstance(made, QuantizedTensor)
    return made


@dataclass
class Index:
    """What the metadata of the files say, of their own tensors or of all: the entries of quantized parameters, as
    `stored` returns them; and further names of tied parameters, which are not stored -> those that are."""

    quantized: dict[str, serialize.Entry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def to_metadata(self) -> dict[str, str]:
        """The metadata of a file; `Index.parse` is the inverse."""
        data = {"version": NAMES_VERSION, "quantized": self.quantized, "aliases": self.aliases}
        return {METADATA: json.dumps(data)}

    @classmethod
    def parse(cls, metadata: Mapping[str, str]) -> Index:
        """The index in the metadata of a file, which may be untrusted; empty if it has none."""
        if METADATA not in metadata:
            return cls()
        with naming(f"its {METADATA} is not JSON"):
            data = parse_json(metadata[METADATA])
        if not isinstance(data, dict) or type(data.get("version")) is not int or data["version"] != NAMES_VERSION:
            found = data.get("version") if isinstance(data, dict) else None
            raise ValueError(f"its {METADATA} has version {found!r:.40}; this qtorch reads version {NAMES_VERSION}")
        quantized, aliases = data.get("quantized", {}), data.get("aliases", {})
        if not isinstance(quantized, dict) or not isinstance(aliases, dict):
            raise ValueError(f"its {METADATA} has no objects 'quantized' and 'aliases'")
        header.check_entries(quantized)
        for name, source in aliases.items():
            if not isinstance(source, str) or source in aliases:
                raise ValueError(f"{name} is another name of {source!r:.80}, which is no name of a tensor")
        return cls(quantized, aliases)

    def add(self, other: Index) -> None:
        """Add what another file says, which must not contradict this."""
        pairs: list[tuple[dict[str, Any], dict[str, Any]]]
        pairs = [(self.quantized, other.quantized), (self.aliases, other.aliases)]
        for mine, theirs in pairs:
            for name, value in theirs.items():
                if mine.setdefault(name, value) != value:
                    raise ValueError(f"its files describe {name} in different ways")

    def owners(self) -> dict[str, tuple[str, str]]:
        """Stored name -> (parameter, part), for all parts of all quantized parameters."""
        found: dict[str, tuple[str, str]] = {}
        for name, entry in self.quantized.items():
            for part, key in entry["tensors"].items():
                if found.setdefault(key, (name, part)) != (name, part):
                    raise ValueError(f"{key!r:.80} is used for more than one tensor")
        return found


QUANT_METHOD = "qtorch"

VERSION = 1

Names = Literal["model", "checkpoint"]
"""Whose names the folder stores: those of the model in memory, or those of an older checkpoint, which transformers has
to rename (and whose experts it has to fuse) while it loads them."""


def quantization_config(recipe: Any = None, names: Names = "model", **more: Any) -> dict[str, Any]:
    """The JSON data of `quantization_config` in config.json, with `more` keys. The recipe, or the mapping of names to
    recipes, is for people who read the file: loading does not need it."""
    return {"quant_method": QUANT_METHOD, "version": VERSION, "recipe": recipe_json(recipe), "names": names, **more}


def recipe_json(recipe: Any) -> Any:
    """A recipe as JSON data, a mapping as a list of pairs, whose order counts; a recipe with data becomes its text."""
    if isinstance(recipe, Mapping):
        return [[name, recipe_json(each)] for name, each in recipe.items()]
    if getattr(recipe, "data", None) is not None:
        return str(recipe)
    try:
        return to_json(recipe)
    except TypeError:
        return str(recipe)


def read_recipe(data: Any) -> Any:
    """Inverse of `recipe_json`; text, and what this version does not know, stay as they are."""
    if isinstance(data, list) and all(isinstance(item, list | tuple) and len(item) == 2 for item in data):
        return {name: read_recipe(each) for name, each in data}
    try:
        return from_json(data) if isinstance(data, dict) else data
    except ValueError:
        return data


def is_ours(config: Any) -> bool:
    """Whether the contents of a config.json say that the folder is of this format."""
    entry = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(entry, dict) and entry.get("quant_method") == QUANT_METHOD


@sources.register_source
class TransformersFolder(sources.CanonicalSource):
    """A folder of `save_pretrained`, or of accelerate's `save_model`, or one file of it that holds a whole model. There
    are no checksums to verify."""

    format = "transformers folder of qtorch"

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        try:
            config = read_object(path / CONFIG) if path.is_dir() else None
            if config is not None:
                return is_ours(config)
            root = find_root(path)  # such as accelerate writes it, which has no configuration
            if root is None:
                return False
            with tensor_file.TensorFile(root) if root.suffix == SUFFIX else HFFolder(path) as opened:
                return METADATA in opened.metadata
        except (OSError, ValueError):
            return False

    @classmethod
    def open(cls, path: Path, *, verify: bool, mmap: bool) -> TransformersFolder:
        try:
            return HFFolder.opened(path, lambda folder: cls(folder, mmap))
        except FileNotFoundError as error:
            raise ValueError(str(error)) from error

    def __init__(self, folder: HFFolder, mmap: bool) -> None:
        self.path, self.folder, self.mmap = folder.path, folder, mmap
        self.index = Index()
        with naming(self.path):
            for file in folder.files:
                self.index.add(Index.parse(file.metadata))
            plain = self._check_names()
        self.entries, self.aliases = self.index.quantized, self.index.aliases
        self.names = plain | self.entries.keys() | self.aliases.keys()

    def close(self) -> None:
        self.folder.close()

    def stored(self, key: str) -> tensor_file.Stored:
        return self.folder.stored[key]

    def read(self, key: str) -> torch.Tensor:
        return self.folder.read(key, mmap=self.mmap)

    def _check_names(self) -> set[str]:
        """Check the names of the index against those of the files; the names of the tensors that are not quantized."""
        parts, quantized, stored = self.index.owners().keys(), set(self.index.quantized), self.folder.stored
        if missing := sorted(parts - stored.keys()):
            raise ValueError(f"missing key {', '.join(missing[:4])}")
        for name in quantized & stored.keys():
            if name not in parts and not is_marker(stored[name].shape):
                raise ValueError(f"{name} is stored both quantized and in floating point")
        plain = stored.keys() - parts - quantized
        for name, of in self.index.aliases.items():
            if name in plain | quantized or of not in plain | quantized:
                raise ValueError(f"{name} is another name of {of!r:.80}, but is stored itself, or that is not")
        return plain


@save_folder.register_save_format
class TransformersFormat(save_folder.SaveFormat):
    """A folder that `from_pretrained` loads, after `import qtorch.integrations.transformers`."""

    name = "transformers"

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.recipe: Any = None
        self.names: Names = "model"
        self.entries: dict[str, serialize.Entry] = {}

    def store(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not isinstance(tensor, QuantizedTensor):
            return {name: tensor}
        tensors, self.entries[name] = stored(name, tensor)
        return tensors

    def metadata(self, keys: Iterable[str]) -> dict[str, str]:
        # The marker of a quantized tensor has its name.
        entries = {key: self.entries[key] for key in keys if key in self.entries}
        return Index(entries).to_metadata() if entries else {}

    def config(self) -> dict[str, Any]:
        return quantization_config(self.recipe, self.names)

    def progress(self) -> Any:
        return self.entries

    def resume(self, progress: Any) -> None:
        if not isinstance(progress, dict):
            raise ValueError(f"not the progress of a {self.name} checkpoint: {progress!r:.80}")
        for entry in progress.values():
            serialize.scheme_of(entry)
        self.entries = progress
