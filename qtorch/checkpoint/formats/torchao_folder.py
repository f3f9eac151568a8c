"""torchao 0.18 in safetensors: its plain classes; `quant_method` "torchao", or torchao's metadata in a file.

A tensor of class C called ``layer.weight`` is stored as ``layer._weight_qdata``, ``layer._weight_scale``, ..., and the
metadata of the file has its class and attributes as JSON, under its name.

    Int8Tensor, IntxUnpackedToInt8Tensor   int8 codes, (q - z) * s; z is a code or a real number
    Int4Tensor                             two signed codes in a byte, the low nibble first; q * s + z
    Float8Tensor                           float8 codes, q * s
    MXTensor                               float8 codes, or two of e2m1 in a byte; e8m0 scales, q * s
    NVFP4Tensor                            as `nvfp4_parts`

Classes whose codes or scales are in the order of a device are refused. Activations stay in floating point. Source:
torchao 0.18 `prototype/safetensors/`, `quantization/quantize_/workflows/`, `prototype/mx_formats/`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...primitives import Granularity, MappingType, PerGroup, QuantSpec, ZeroPointDomain, files, qdtype
from ...primitives.files import open_regular
from ...primitives.granularity import granularity_of
from ...primitives.layouts.tensor_core_tiled import unpack_cuda
from ...primitives.spec import NVFP4_BLOCK, mx_spec, nvfp4_spec
from ..hf_folder import DTYPES, FolderSource, HFFolder, Parts, Seen, StoredWeight, find_root
from ..pickled_file import PickledFile
from ..sources import PICKLES, Source, register_source
from .blocks import FLOATS, Cut, check_stored, symmetric_spec, unpack_nibbles, weight_only
from .small_floats import FLOAT8, nvfp4_parts

INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
_NAMES = "tensor_names"
_PLAIN = "Tensor"
_MX_ELEMENTS = {"float8_e4m3fn": None, "float8_e5m2": None, "float4_e2m1fn_x2": "float4_e2m1"}
"""Elements of MXTensor -> the name of the type here, None if it is the same."""


class Entry:
    """A tensor of torchao in a file: its class `kind` with attributes, and the stored name of each part."""

    def __init__(self, folder: HFFolder, name: str, kind: str, attributes: Mapping[str, Any]) -> None:
        self.folder, self.name, self.kind, self.attributes = folder, name, kind, attributes
        parent, _, last = name.rpartition(".")
        prefix = f"{parent}._{last}_" if parent else f"_{last}_"
        self.tensors = {key.removeprefix(prefix): key for key in folder.stored if key.startswith(prefix)}
        self.stored = tuple(self.tensors.values())

    def error(self, why: str) -> ValueError:
        return ValueError(f"{self.folder.path}: {self.name}, a {self.kind} of torchao, {why}")

    def shape(self, part: str) -> tuple[int, ...]:
        """Shape of a part, which must not be missing."""
        if part not in self.tensors:
            raise self.error(f"has no {part}")
        return self.folder.stored[self.tensors[part]].shape

    def check(self, part: str, dtypes: Any, shape: Any) -> torch.dtype:
        """The dtype of a part, after `check_stored`."""
        self.shape(part)
        return check_stored(self.folder, self.tensors[part], dtypes, shape).dtype

    def dtype(self, key: str = "dtype") -> torch.dtype:
        """A dtype among the attributes, which must be one of a weight."""
        name = self.named(key)
        if name not in DTYPES:
            raise self.error(f"has the {key} {name!r:.40}; known: {', '.join(DTYPES)}")
        return DTYPES[name]

    def named(self, key: str) -> str:
        """The name of a dtype or of a member of an enumeration among the attributes."""
        value = self.attributes.get(key)
        return str(value.get("_data") if isinstance(value, dict) else value)

    def blocks(self, shape: tuple[int, ...]) -> tuple[Granularity, tuple[int, ...]]:
        """Granularity and number of blocks, from `block_size`; empty or missing means the whole tensor."""
        block = self.attributes.get("block_size") or list(shape)
        if not isinstance(block, list) or len(block) != len(shape) or not all(type(b) is int and b > 0 for b in block):
            raise self.error(f"has the block_size {block!r:.80}, and codes of shape {shape}")
        if any(n % b for n, b in zip(shape, block, strict=True)):
            raise self.error(f"has the block_size {block!r:.80}, which does not divide {shape}")
        granularity = granularity_of([-1 if b == n else b for n, b in zip(shape, block, strict=True)])
        return granularity, tuple(n // b for n, b in zip(shape, block, strict=True))

    def of_blocks(self, part: str, dtypes: Sequence[torch.dtype], blocks: tuple[int, ...]) -> torch.dtype:
        """The dtype of a part with a number for each block, as `check`; axes with one block may be missing."""
        stored = self.shape(part)
        fits = [size for size in stored if size != 1] == [size for size in blocks if size != 1]
        return self.check(part, dtypes, stored if fits else blocks)

    def weight(
        self, spec: QuantSpec, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Parts]
    ) -> StoredWeight:
        return StoredWeight(self.stored, weight_only(spec, shape, dtype), read)


@register_source
class TorchaoSource(FolderSource):
    """A folder or file of torchao's tensors."""

    format = "torchao"
    methods: ClassVar[tuple[str, ...]] = ("torchao",)
    classes: ClassVar[Mapping[str, Callable[[Entry], StoredWeight]]] = {}

    @classmethod
    def matches(cls, seen: Seen) -> bool:
        return super().matches(seen) or (not seen.method and _NAMES in seen.metadata)

    def find_weights(self) -> dict[str, StoredWeight]:
        entries = [self._entry(name, text) for name, text in sorted(self.folder.metadata.items())]
        return {entry.name: self._weight(entry) for entry in entries if entry is not None}

    def _entry(self, name: str, text: str) -> Entry | None:
        if name in (_NAMES, "format") or not text.startswith("{"):
            return None
        with files.naming(self.path, f"the metadata of {name} is not JSON"):
            data: Any = files.parse_json(text)
        kind, attributes = data.get("_type"), data.get("_data", {})
        if kind in (None, _PLAIN):
            return None
        if not isinstance(kind, str) or not isinstance(attributes, dict):
            raise ValueError(f"{self.path}: the metadata of {name} has the class {kind!r:.40}")
        return Entry(self.folder, name, kind, attributes)

    def _weight(self, entry: Entry) -> StoredWeight:
        if entry.kind not in self.classes:
            raise entry.error(
                f"is not read; known: {', '.join(self.classes)}. Int4TilePackedTo4dTensor and its like keep codes in "
                "the order of a device: dequantize them there, or quantize the original model"
            )
        if "act_pre_scale" in entry.tensors:
            raise entry.error("scales the input of its layer (act_pre_scale), which has no place in the model")
        if entry.attributes.get("is_swizzled_scales"):
            raise entry.error("has scales in the order of a device (is_swizzled_scales); quantize the original model")
        return self.classes[entry.kind](entry)


def _integers(entry: Entry) -> StoredWeight:
    return integers(entry, "int8" if entry.kind == "Int8Tensor" else entry.named("target_dtype"))


def integers(entry: Entry, kind: str, stored: torch.dtype = torch.int8) -> StoredWeight:
    """Codes of `kind`, a byte each, with scales, and zero points that are codes or real numbers, if any."""
    if kind not in [f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 9)]:
        raise entry.error(f"has the target_dtype {kind!r:.40}")
    shape = entry.shape("qdata")
    entry.check("qdata", [stored], shape)
    granularity, blocks = entry.blocks(shape)
    scale_dtype = entry.of_blocks("scale", FLOATS, blocks)
    if "zero_point" in entry.tensors:
        of_codes = entry.of_blocks("zero_point", (*INTEGERS, *FLOATS), blocks) in INTEGERS
        domain = ZeroPointDomain.INT if of_codes else ZeroPointDomain.FRACTIONAL
        spec = QuantSpec(qdtype(kind), granularity, MappingType.ASYMMETRIC, domain, scale_dtype=scale_dtype)
    else:
        spec = symmetric_spec(kind, granularity, scale_dtype)

    def read() -> Parts:
        found = {part: entry.folder.read(name) for part, name in entry.tensors.items()}
        low, high = spec.code_range
        for part, values in found.items():
            if (
                values.dtype in INTEGERS
                and values.numel()
                and not low <= int(values.min()) <= int(values.max()) <= high
            ):
                raise ValueError(f"{part} reaches from {int(values.min())} to {int(values.max())}, {kind} does not")
        if "zero_point" in found and found["zero_point"].dtype in INTEGERS:
            found["zero_point"] = found["zero_point"].to(stored)
        return found.pop("qdata"), {part: values.reshape(blocks) for part, values in found.items()}

    return entry.weight(spec, shape, entry.dtype(), read)


def _int4(entry: Entry) -> StoredWeight:
    *outer, outputs, half = entry.shape("qdata") if len(entry.shape("qdata")) > 1 else (0, 0)
    entry.check("qdata", [torch.int8, torch.uint8], (*outer, outputs, half))
    shape = (*outer, outputs, 2 * half)
    block = entry.attributes.get("block_size")
    if not isinstance(block, list) or len(block) != len(shape) or set(block[:-1]) != {1} or type(block[-1]) is not int:
        raise entry.error(f"has the block_size {block!r:.80}, and codes of shape {shape}")
    if entry.attributes.get("shape") != list(shape) or block[-1] < 1:
        raise entry.error(f"has the shape {entry.attributes.get('shape')!r:.80}, and codes of shape {shape}")
    cut = Cut.of(shape[-1], block[-1])
    groups = -(-shape[-1] // block[-1])
    dtype = entry.check("scale", FLOATS, (*outer, groups, outputs))
    entry.check("zero_point", [dtype], (*outer, groups, outputs))
    # As unsigned codes u = q + 8, this is the FLOAT domain: (u - 8) * s + z.
    domain, mapping = ZeroPointDomain.FLOAT, MappingType.ASYMMETRIC
    spec = QuantSpec(qdtype("uint4"), PerGroup(cut.part), mapping, domain, scale_dtype=dtype)

    def read() -> Parts:
        folder, tensors = entry.folder, entry.tensors
        codes = unpack_nibbles(folder.read(tensors["qdata"]).view(torch.uint8)) ^ 8
        others = {part: cut.copies(folder.read(tensors[part]).mT, -1).contiguous() for part in ("scale", "zero_point")}
        return codes, others

    return entry.weight(spec, shape, dtype, read)


def float8(entry: Entry) -> StoredWeight:
    """Float8Tensor."""
    shape = entry.shape("qdata")
    kind = entry.check("qdata", FLOAT8, shape)
    granularity, blocks = entry.blocks(shape)
    spec = symmetric_spec(kind, granularity, entry.of_blocks("scale", FLOATS, blocks))

    def read() -> Parts:
        scale = entry.folder.read(entry.tensors["scale"]).reshape(blocks)
        return entry.folder.read(entry.tensors["qdata"]), {"scale": scale}

    return entry.weight(spec, shape, entry.dtype(), read)


def _mx(entry: Entry) -> StoredWeight:
    element, size = entry.named("elem_dtype"), entry.attributes.get("block_size")
    if element not in _MX_ELEMENTS or size != 32:
        raise entry.error(f"has the elements {element!r:.40} in blocks of {size!r:.40}, which are not read")
    packed = _MX_ELEMENTS[element]
    stored = entry.shape("qdata")
    entry.check("qdata", [torch.uint8] if packed else [getattr(torch, element)], stored)
    shape = (*stored[:-1], stored[-1] * 2) if packed else stored
    entry.check("scale", [torch.float8_e8m0fnu], (*shape[:-1], shape[-1] // 32))
    spec = mx_spec(packed or element)

    def read() -> Parts:
        codes = entry.folder.read(entry.tensors["qdata"])
        return unpack_nibbles(codes) if packed else codes, {"scale": entry.folder.read(entry.tensors["scale"])}

    return entry.weight(spec, shape, entry.dtype("orig_dtype"), read)


def _nvfp4(entry: Entry) -> StoredWeight:
    *outer, half = entry.shape("qdata") or (0,)
    entry.check("qdata", [torch.uint8], (*outer, half))
    entry.check("scale", [torch.float8_e4m3fn], (*outer, 2 * half // NVFP4_BLOCK))
    if 2 * half % NVFP4_BLOCK:
        raise entry.error(f"has rows of {2 * half}, not a multiple of {NVFP4_BLOCK}")
    if "per_tensor_scale" in entry.tensors:
        entry.check("per_tensor_scale", [torch.float32], ())

    def read() -> Parts:
        folder, tensors = entry.folder, entry.tensors
        factor = torch.ones((), dtype=torch.float32, device="cpu")
        if "per_tensor_scale" in tensors:
            factor = folder.read(tensors["per_tensor_scale"])
        return nvfp4_parts(folder.read(tensors["qdata"]), folder.read(tensors["scale"]), factor)

    return entry.weight(nvfp4_spec(), (*outer, 2 * half), entry.dtype("orig_dtype"), read)


TorchaoSource.classes = {
    "Int8Tensor": _integers, "IntxUnpackedToInt8Tensor": _integers, "Int4Tensor": _int4, "Float8Tensor": float8,
    "MXTensor": _mx, "NVFP4Tensor": _nvfp4,
}  # fmt: skip


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
    """torchao's tensors in files of `torch.save`: pytorch_model.bin of a folder, also with an index, or a .pt file.

    Beside the classes of `torchao_folder`, those of torchao before 0.15, an AffineQuantizedTensor with a `tensor_impl`:

        PlainAQTTensorImpl, QDQTensorImpl   int_data, scale, zero_point: (q - z) * s, or q * s in the domain NONE (3)
        Float8AQTTensorImpl                 float8_data, scale: q * s
        TensorCoreTiledAQTTensorImpl        int4 in the order of CUDA's tinygemm, scale_and_zero: (q - 8) * s + z

    A LinearActivationQuantizedTensor around them is left out: activations stay in floating point. torchao computes in
    the dtype of the model and rounds after each step, here the numbers are rounded once. Source: torchao 0.9 to 0.15
    `dtypes/`.
    """

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
