"""Writing a folder of transformers weight by weight; see `SaveFormat`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ...checkpoint.save_format import SaveFormat, register_save_format
from ...dtypes import QuantizedTensor
from ...dtypes.serialize import Entry, scheme_of
from .config import Names, quantization_config
from .names import Index, stored


@register_save_format
class TransformersFormat(SaveFormat):
    """A folder that `from_pretrained` loads, after `import qtorch.integrations.transformers`.

    Attributes:
        recipe: for `quantization_config`.
        names: whose names the tensors have.
    """

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
