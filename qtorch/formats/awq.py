"""AWQ in the gemm packing: AutoAWQ, GPTQModel, transformers.

    qweight   int32 (I, O / 8)      codes of 4 bits, packed along the outputs
    qzeros    int32 (G, O / 8)      zero points
    scales    (G, O)                fp16
    w = (q - z) * s

The bits 4 i to 4 i + 3 of a word hold its output 0, 2, 4, 6, 1, 3, 5, 7 for i from 0 to 7. Source: AutoAWQ 0.2.9
`awq/utils/packing_utils.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checkpoint.folder_source import FolderSource, Parts, Seen, StoredWeight
from ..checkpoint.hf_folder import HFFolder
from ..checkpoint.source import register_source
from .blocks import FLOATS, Cut, block_of_groups, check_stored, group_sizes, integer_spec, weight_only, with_suffix

BITS = 4
PER_WORD = 8
_SETTINGS = "quant_config.json"
"""The configuration of former versions, where config.json has none."""

_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of each output of a word: the inverse of the order at the top of the file."""


@register_source
class AwqSource(FolderSource):
    """A folder of AutoAWQ."""

    format = "awq"
    methods = ("awq",)

    @classmethod
    def matches(cls, seen: Seen) -> bool:
        if seen.method:
            return seen.method in cls.methods
        return _SETTINGS in seen.files and any(name.endswith(".qweight") for name in seen.names)

    def find_weights(self) -> dict[str, StoredWeight]:
        config = self.folder.quantization_config or self.folder.json(_SETTINGS) or {}
        version = str(config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm")
        if version.lower() != "gemm":
            raise ValueError(
                f"{self.path}: AWQ of version {version!r:.40} is not read, only 'gemm': save it by AutoAWQ with "
                "version='gemm', or quantize the original model"
            )
        bits = config.get("bits", config.get("w_bit", BITS))
        if bits != BITS:
            raise ValueError(f"{self.path}: AWQ of {bits!r:.40} bits is not read, only {BITS}; use the format gptq")
        return awq_weights(self, group_sizes(config))


def awq_weights(source: FolderSource, sizes: Sequence[int]) -> dict[str, StoredWeight]:
    """Every weight of a folder in this format, by the name of the parameter.

    Args:
        sizes: group sizes that the configuration names.

    Raises:
        ValueError: a tensor is missing, or does not fit; the message names the file and the tensor.
    """
    names = with_suffix(source.folder, ".qweight")
    return {f"{name}.weight": _weight(source, name, sizes) for name in names}


def _weight(source: FolderSource, name: str, sizes: Sequence[int]) -> StoredWeight:
    folder = source.folder
    check_stored(folder, f"{name}.qweight", [torch.int32], (None, None))
    check_stored(folder, f"{name}.scales", FLOATS, (None, None))
    inputs, words = folder.stored[f"{name}.qweight"].shape
    groups, outputs = folder.stored[f"{name}.scales"].shape
    check_stored(folder, f"{name}.scales", FLOATS, (groups, words * PER_WORD))
    check_stored(folder, f"{name}.qzeros", [torch.int32], (groups, words))
    try:
        cut = Cut.of(inputs, block_of_groups(inputs, groups, sizes))
    except ValueError as error:
        raise ValueError(f"{folder.file_of(f'{name}.qweight')}: {name}.qweight: {error}") from error
    scale_dtype = folder.stored[f"{name}.scales"].dtype
    spec = integer_spec(BITS, cut.granularity, scale_dtype)
    scheme = weight_only(spec, (outputs, inputs), source.dtype_of(scale_dtype))
    tensors = (f"{name}.qweight", f"{name}.qzeros", f"{name}.scales")
    return StoredWeight(tensors, scheme, lambda: _read(folder, name, cut))


def _read(folder: HFFolder, name: str, cut: Cut) -> Parts:
    codes = _unpack(folder.read(f"{name}.qweight"))
    zeros = _unpack(folder.read(f"{name}.qzeros"))
    scale = folder.read(f"{name}.scales").t()
    return codes, {
        "scale": cut.copies(scale, 1).contiguous(),
        "zero_point": cut.copies(zeros, 1).contiguous(),
    }


def _unpack(words: Tensor) -> Tensor:
    """int32 (I, W) -> uint8 (8 W, I), outputs in order."""
    rows = words.t().contiguous()
    codes = [((rows >> (BITS * nibble)) & 0xF).to(torch.uint8) for nibble in _NIBBLES]
    return torch.stack(codes, 1).flatten(0, 1)
