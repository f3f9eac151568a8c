"""GPTQ: AutoGPTQ, GPTQModel, optimum.

    qweight   int32 (I b / 32, O)     codes packed along the inputs
    qzeros    int32 (G, O b / 32)     zero points, packed along the outputs
    scales    (G, O)                  fp16, or the dtype of the model
    g_idx     int32 (I)               optional: the group of each input
    w = (q - z) * s

`checkpoint_format` says how zero points are stored: "gptq" z - 1, "gptq_v2" z; both pack densely, so that codes of 3
bits straddle words. "gptq_p" stores z and packs in planes (`bit_stream`). Sources: AutoGPTQ 0.7.1
`qlinear_cuda_old.py`, GPTQModel 7.7 `nn_modules/qlinear/__init__.py` and `utils/planar_packing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..folder_source import FolderSource, Parts, Seen, StoredWeight
from ..hf_folder import HFFolder
from ..sources import register_source
from .blocks import (
    FLOATS,
    Cut,
    block_of_groups,
    check_stored,
    group_sizes,
    integer_spec,
    unpack_dense,
    unpack_planar,
    weight_only,
    with_suffix,
)

_WORD = 32
_SETTINGS = "quantize_config.json"
"""The configuration of AutoGPTQ, where config.json has none."""


@dataclass(frozen=True)
class GptqFormat:
    """How a `checkpoint_format` stores codes.

    Attributes:
        minus_one: zero points are stored as z - 1.
        planar: codes are packed in planes.
        bits: widths of codes.
        borrows: z - 1 was computed on whole words, so that a zero point of 0 borrows from its neighbour (GPTQModel).
    """

    minus_one: bool
    planar: bool = False
    bits: tuple[int, ...] = (2, 3, 4, 8)
    borrows: bool = False


FORMATS = {
    "gptq": GptqFormat(minus_one=True),
    "gptq_v2": GptqFormat(minus_one=False),
    "gptq_p": GptqFormat(minus_one=False, planar=True, bits=(2, 3, 4, 5, 6, 7, 8)),
}


@register_source
class GptqSource(FolderSource):
    """A folder of AutoGPTQ or GPTQModel."""

    format = "gptq"
    methods = ("gptq", "gptqmodel")

    @classmethod
    def matches(cls, seen: Seen) -> bool:
        if seen.method:
            return seen.method in cls.methods
        return _SETTINGS in seen.files and any(name.endswith(".qweight") for name in seen.names)

    def find_weights(self) -> dict[str, StoredWeight]:
        config = self.folder.quantization_config or self.folder.json(_SETTINGS) or {}
        name = str(config.get("checkpoint_format") or config.get("format") or "gptq")
        if config.get("is_marlin_format"):
            name = "marlin"
        if name not in FORMATS:
            raise ValueError(
                f"{self.path}: checkpoint_format is {name!r:.40}, which is not read; known: {', '.join(FORMATS)}. "
                "Convert it by GPTQModel, or quantize the original model"
            )
        kind = FORMATS[name]
        meta = config.get("meta")
        if kind.minus_one and "gptqmodel" in str(meta.get("quantizer") if isinstance(meta, dict) else ""):
            kind = GptqFormat(minus_one=True, borrows=True)
        return gptq_weights(self, kind, group_sizes(config))


def gptq_weights(source: FolderSource, kind: GptqFormat, sizes: Sequence[int]) -> dict[str, StoredWeight]:
    """Every weight of a folder in this format, by the name of the parameter.

    Args:
        sizes: group sizes that the configuration names.

    Raises:
        ValueError: a tensor is missing, or does not fit; the message names the file and the tensor.
    """
    names = with_suffix(source.folder, ".qweight")
    return {f"{name}.weight": _weight(source, name, kind, sizes) for name in names}


def _weight(source: FolderSource, name: str, kind: GptqFormat, sizes: Sequence[int]) -> StoredWeight:
    folder = source.folder
    check_stored(folder, f"{name}.qweight", [torch.int32], (None, None))
    check_stored(folder, f"{name}.scales", FLOATS, (None, None))
    rows, outputs = folder.stored[f"{name}.qweight"].shape
    groups = folder.stored[f"{name}.scales"].shape[0]
    check_stored(folder, f"{name}.scales", FLOATS, (groups, outputs))
    check_stored(folder, f"{name}.qzeros", [torch.int32], (groups, None))
    words = folder.stored[f"{name}.qzeros"].shape[1]
    bits = words * _WORD // outputs if outputs else 0
    if bits not in kind.bits or bits * outputs != words * _WORD or rows * _WORD % bits:
        raise ValueError(
            f"{folder.file_of(f'{name}.qweight')}: {name}.qweight has shape {(rows, outputs)} and {name}.qzeros "
            f"{(groups, words)}, which is no packing of codes of {', '.join(map(str, kind.bits))} bits"
        )
    inputs = rows * _WORD // bits
    tensors = [f"{name}.qweight", f"{name}.qzeros", f"{name}.scales"]
    if f"{name}.g_idx" in folder.stored:
        check_stored(folder, f"{name}.g_idx", [torch.int32, torch.int64], (inputs,))
        tensors.append(f"{name}.g_idx")
    try:
        cut = Cut.of(inputs, block_of_groups(inputs, groups, sizes))
    except ValueError as error:
        raise ValueError(f"{folder.file_of(f'{name}.qweight')}: {name}.qweight: {error}") from error
    scale_dtype = folder.stored[f"{name}.scales"].dtype
    spec = integer_spec(bits, cut.granularity, scale_dtype)
    scheme = weight_only(spec, (outputs, inputs), source.dtype_of(scale_dtype))
    return StoredWeight(tuple(tensors), scheme, lambda: _read(folder, name, kind, bits, outputs, cut))


def _read(folder: HFFolder, name: str, kind: GptqFormat, bits: int, outputs: int, cut: Cut) -> Parts:
    unpack = unpack_planar if kind.planar else unpack_dense
    if f"{name}.g_idx" in folder.stored:
        _check_order(folder.read(f"{name}.g_idx"), cut.block)
    codes = unpack(folder.read(f"{name}.qweight").t(), bits, cut.size)
    words = folder.read(f"{name}.qzeros")
    zeros = unpack(words, bits, outputs)
    if kind.minus_one:
        zeros = _plus_one(words, zeros, bits, outputs, kind.borrows)
    scale = folder.read(f"{name}.scales").t()
    return codes, {
        "scale": cut.copies(scale, 1).contiguous(),
        "zero_point": cut.copies(zeros.t(), 1).contiguous(),
    }


def _plus_one(words: Tensor, stored: Tensor, bits: int, outputs: int, borrows: bool) -> Tensor:
    """The zero points of stored ones, which are one less.

    Raises:
        ValueError: a stored zero point is the largest code, which is 0 - 1 or the largest plus one.
    """
    if not bool((stored == 2**bits - 1).any()):
        return stored + 1
    if borrows and _WORD % bits == 0:
        ones = sum(1 << shift for shift in range(0, _WORD, bits))
        return unpack_dense((words.long() + ones).to(torch.int32), bits, outputs)
    raise ValueError(
        f"a zero point is stored as {2**bits - 1}; in the format 'gptq', which stores z - 1, readers disagree whether "
        "that is 0 or one more than the largest code. Save it as 'gptq_v2' by the package that wrote it"
    )


def _check_order(g_idx: Tensor, block: int) -> None:
    """Raise `ValueError` if inputs are not grouped in order."""
    if not torch.equal(g_idx.long(), torch.arange(len(g_idx), device="cpu") // block):
        raise ValueError(
            "g_idx groups inputs out of order (desc_act=True), so that no scales of consecutive inputs represent it; "
            "quantize with desc_act=False or static_groups=True"
        )


# --------------------------------------------------------------------------------------------------
# AWQ in the gemm packing: AutoAWQ, GPTQModel, transformers.
#
#     qweight   int32 (I, O / 8)      codes of 4 bits, packed along the outputs
#     qzeros    int32 (G, O / 8)      zero points
#     scales    (G, O)                fp16
#     w = (q - z) * s
#
# The bits 4 i to 4 i + 3 of a word hold its output 0, 2, 4, 6, 1, 3, 5, 7 for i from 0 to 7. Source: AutoAWQ 0.2.9
# `awq/utils/packing_utils.py`.


BITS = 4
PER_WORD = 8
_AWQ_SETTINGS = "quant_config.json"
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
        return _AWQ_SETTINGS in seen.files and any(name.endswith(".qweight") for name in seen.names)

    def find_weights(self) -> dict[str, StoredWeight]:
        config = self.folder.quantization_config or self.folder.json(_AWQ_SETTINGS) or {}
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
    return {f"{name}.weight": _awq_weight(source, name, sizes) for name in names}


def _awq_weight(source: FolderSource, name: str, sizes: Sequence[int]) -> StoredWeight:
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
    return StoredWeight(tensors, scheme, lambda: _read_awq(folder, name, cut))


def _read_awq(folder: HFFolder, name: str, cut: Cut) -> Parts:
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


# --------------------------------------------------------------------------------------------------
# AutoRound's own formats, which are packings of GPTQ and AWQ under another `quant_method`.
#
#     packing_format                              tensors
#     auto_round:auto_gptq, auto_round:gptq       GPTQ, zero points stored as z - 1
#     auto_round, auto_round:gptqmodel            GPTQ, zero points stored as z
#     auto_round:auto_awq, auto_round:awq         AWQ
#
# Source: auto-round 0.16 `auto_round/inference/backend.py`. Layers of other widths are found by the shapes of their
# tensors; `extra_config` gives their group sizes.


_GPTQ = {
    "auto_round:auto_gptq": GptqFormat(minus_one=True),
    "auto_round:gptq": GptqFormat(minus_one=True),
    "auto_round": GptqFormat(minus_one=False),
    "auto_round:gptqmodel": GptqFormat(minus_one=False),
}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_DEFAULT = "auto_round:auto_gptq"
"""That of transformers' AutoRoundConfig, for files without one."""


@register_source
class AutoRoundSource(FolderSource):
    """A folder of AutoRound."""

    format = "auto-round"
    methods = ("auto-round", "intel/auto-round")

    def find_weights(self) -> dict[str, StoredWeight]:
        config = self.folder.quantization_config
        packing = str(config.get("packing_format") or _DEFAULT)
        sizes = group_sizes(config)
        if packing in _AWQ:
            return awq_weights(self, sizes)
        if packing not in _GPTQ:
            raise ValueError(
                f"{self.path}: packing_format is {packing!r:.60}, which is not read; known: "
                f"{', '.join([*_GPTQ, *_AWQ])}. Export it by AutoRound in one of these, or in format llm_compressor "
                "as a folder of compressed-tensors"
            )
        return gptq_weights(self, _GPTQ[packing], sizes)
