"""torchao's tensors in files of `torch.save`: pytorch_model.bin of a folder, with or without an index, or a .pt file.

Beside the classes of `torchao_folder`, those of torchao before 0.15, an AffineQuantizedTensor with a `tensor_impl`:

    PlainAQTTensorImpl, QDQTensorImpl   int_data, scale, zero_point: (q - z) * s, or q * s in the domain NONE (3)
    Float8AQTTensorImpl                 float8_data, scale: q * s
    TensorCoreTiledAQTTensorImpl        int4 in the order of CUDA's tinygemm, scale_and_zero: (q - 8) * s + z

A LinearActivationQuantizedTensor around them is left out: activations stay in floating point. torchao computes in the
dtype of the model and rounds after each step, here the numbers are rounded once. Source: torchao 0.9 to 0.15 `dtypes/`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...primitives import MappingType, PerGroup, QuantSpec, ZeroPointDomain, qdtype
from ...primitives.files import open_regular
from ...primitives.layouts.tensor_core_tiled import unpack_cuda
from ..folder_source import Parts, StoredWeight
from ..hf_folder import HFFolder, find_root
from ..pickled_file import PickledFile
from ..sources import PICKLES, Source, register_source
from .blocks import FLOATS
from .torchao_folder import Entry, TorchaoSource, float8, integers

_INDEX = "pytorch_model.bin.index.json"
_SEEN = 1 << 24
"""Bytes at the beginning of a file, where its pickle is, that are searched for the name of the package."""

_INT, _NONE = 1, 3
"""Values of torchao's ZeroPointDomain."""


def _root(path: Path) -> Path | None:
    """An index, pytorch_model.bin, or the file itself; None where there are safetensors."""
    files = [path / _INDEX, path / "pytorch_model.bin"] if path.is_dir() else [path]
    found = next((file for file in files if file.is_file() and file.name.endswith((*PICKLES, _INDEX))), None)
    return found if find_root(path) is None else None


@register_source
class TorchaoPickleSource(TorchaoSource):
    """A folder or file of torchao's tensors, pickled."""

    format = "torchao pickle"
    methods = ()

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        root = _root(path)
        if root is not None and root.name == _INDEX:
            root = min(root.parent.glob("pytorch_model-*.bin"), default=None)
        if root is None or not root.is_file():
            return False
        with open_regular(root) as file:
            return b"torchao." in file.read(_SEEN)

    @classmethod
    def open(cls, path: Path, *, verify: bool = True, mmap: bool = False) -> Source:
        return HFFolder.opened(path, lambda folder: cls(folder, mmap=mmap), root=_root(path), opens=PickledFile)


def _rename(entry: Entry, codes: str) -> None:
    """Let the part `codes` have the name that it has in newer classes."""
    if codes in entry.tensors:
        entry.tensors["qdata"] = entry.tensors.pop(codes)


def _affine(entry: Entry) -> StoredWeight:
    _rename(entry, "int_data")
    stored = entry.check("qdata", (torch.int8, torch.uint8), entry.shape("qdata"))
    low, high, domain = (entry.attributes.get(key) for key in ("quant_min", "quant_max", "zero_point_domain"))
    kinds = [f"{'int' if stored is torch.int8 else 'uint'}{bits}" for bits in range(1, 9)]
    if type(low) is type(high) is int:
        kinds = [kind for kind in kinds if qdtype(kind).quant_min <= low <= high <= qdtype(kind).quant_max][:1]
    if not kinds or domain not in (_INT, _NONE, None):
        raise entry.error(f"has codes from {low!r:.20} to {high!r:.20} in the domain {domain!r:.20}; neither is read")
    if "zero_point" in entry.tensors:
        zero = entry.folder.read(entry.tensors["zero_point"]).double()
        if domain != _NONE and (zero % 1).any():
            raise entry.error("has zero points between its codes")
        if domain == _NONE or not zero.any():
            del entry.tensors["zero_point"]
    return integers(entry, kinds[-1], stored)


def _float8(entry: Entry) -> StoredWeight:
    if entry.attributes.get("transposed"):
        raise entry.error("is transposed; save the weight as it is in its layer")
    _rename(entry, "float8_data")
    return float8(entry)


def _tiled(entry: Entry) -> StoredWeight:
    shape, block = entry.attributes.get("shape"), entry.attributes.get("block_size")
    if not isinstance(shape, list) or len(shape) != 2 or not isinstance(block, list) or block[:-1] != [1]:
        raise entry.error("is no matrix with groups along its rows")
    (rows, columns), group = shape, block[1]
    tiles = entry.shape("packed_weight")
    padded = (tiles[0] * 8, tiles[1] * tiles[3] * 32) if len(tiles) == 4 else (0, 0)
    if group < 8 or columns % group or padded[1] % group or not (0 < rows <= padded[0] and 0 < columns <= padded[1]):
        raise entry.error(f"has the shape {shape!r:.80}, groups of {group} and codes of shape {tiles}")
    entry.check("packed_weight", [torch.int32], (None, None, 32, None))
    dtype = entry.check("scale_and_zero", FLOATS, (padded[1] // group, padded[0], 2))
    domain, mapping = ZeroPointDomain.FLOAT, MappingType.ASYMMETRIC
    spec = QuantSpec(qdtype("uint4"), PerGroup(group), mapping, domain, scale_dtype=dtype)

    def read() -> Parts:
        codes = unpack_cuda(entry.folder.read(entry.tensors["packed_weight"]))[:rows, :columns].contiguous()
        both = entry.folder.read(entry.tensors["scale_and_zero"])[: columns // group, :rows].transpose(0, 1)
        return codes, {"scale": both[..., 0].contiguous(), "zero_point": both[..., 1].contiguous()}

    return entry.weight(spec, (rows, columns), entry.dtype(), read)


TorchaoPickleSource.classes = {
    **TorchaoSource.classes,
    "PlainAQTTensorImpl": _affine,
    "QDQTensorImpl": _affine,
    "Float8AQTTensorImpl": _float8,
    "TensorCoreTiledAQTTensorImpl": _tiled,
}
