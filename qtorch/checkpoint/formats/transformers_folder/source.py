"""The folder as a `Source`, so that `load_quantized` reads it without transformers.

Names are taken as they are stored, which are the names of the model in memory. Folders may be untrusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from ....dtypes import QuantizedTensor
from ....dtypes.serialize import Entry, scheme_of
from ....primitives.files import naming
from ...hf_folder import CONFIG, SUFFIX, HFFolder, find_root, read_object
from ...save_folder import SaveFormat, register_save_format
from ...sources import CanonicalSource, register_source
from ...tensor_file import Stored, TensorFile
from .names import METADATA, Index, Names, is_marker, is_ours, quantization_config, stored


@register_source
class TransformersFolder(CanonicalSource):
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
            with closing(TensorFile(root) if root.suffix == SUFFIX else HFFolder(path)) as opened:
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
        self.path = folder.path
        self.folder = folder
        self.mmap = mmap
        self.index = Index()
        with naming(self.path):
            for file in folder.files:
                self.index.add(Index.parse(file.metadata))
            plain = self._check_names()
        self.entries = self.index.quantized
        self.aliases = self.index.aliases
        self.names = plain | self.entries.keys() | self.aliases.keys()

    def close(self) -> None:
        self.folder.close()

    def stored(self, key: str) -> Stored:
        return self.folder.stored[key]

    def read(self, key: str) -> Tensor:
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


@register_save_format
class TransformersFormat(SaveFormat):
    """A folder that `from_pretrained` loads, after `import qtorch.integrations.transformers`; the recipe is for
    people."""

    name = "transformers"

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.recipe: Any = None
        self.names: Names = "model"
        self.entries: dict[str, Entry] = {}

    def store(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
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
            scheme_of(entry)
        self.entries = progress
