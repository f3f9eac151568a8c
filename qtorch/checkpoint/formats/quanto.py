"""optimum.quanto in safetensors: `quant_method` "quanto", or its quanto_qmap.json beside the tensors.

    weight._data    int8 or float8 (O, I)
    weight._scale   (O, 1), or a single one
    w = q * s

qint4 and qint2 keep codes by groups, without the shape of the weight, and are refused. Source: quanto 0.2.7
`nn/qmodule.py`, `tensor/qbytes.py`.
"""

from __future__ import annotations

import torch

from ..folder_source import FolderSource, Seen, StoredWeight
from ..sources import register_source
from .blocks import with_suffix
from .float8_blocks import FLOAT8, float8_weight

_MAP = "quanto_qmap.json"
_DATA, _SCALE = "._data", "._scale"


@register_source
class QuantoSource(FolderSource):
    """A folder of quanto."""

    format = "quanto"
    methods = ("quanto",)

    @classmethod
    def matches(cls, seen: Seen) -> bool:
        return super().matches(seen) or (seen.method is None and _MAP in seen.files)

    def find_weights(self) -> dict[str, StoredWeight]:
        if grouped := with_suffix(self.folder, f"{_DATA}{_DATA}"):
            raise ValueError(
                f"{self.path}: {grouped[0]} has groups of 4 or 2 bits, and no file of quanto says its shape; quantize "
                "the float checkpoint that it was made from: quantize_checkpoint(source, target, int4_weight_only())"
            )
        names, kinds = with_suffix(self.folder, _DATA), (torch.int8, *FLOAT8)
        return {name: float8_weight(self, f"{name}{_DATA}", f"{name}{_SCALE}", kinds=kinds) for name in names}

    def ignored(self) -> set[str]:
        ends = (".input_scale", ".output_scale")  # of activations, which stay in floating point
        return {name for name in self.folder.stored if name.endswith(ends)}
