"""GPTQ, AWQ, and AutoRound, which packs weights as the two others do.

GPTQ: AutoGPTQ, GPTQModel, optimum.

    qweight   int32 (I b / 32, O)     codes packed along the inputs
    qzeros    int32 (G, O b / 32)     zero points, packed along the outputs
    scales    (G, O)                  fp16, or the dtype of the model
    g_idx     int32 (I)               optional: the group of each input
    w = (q - z) * s

`checkpoint_format` says how zero points are stored: "gptq" z - 1, "gptq_v2" z; both pack densely, so that codes of 3
bits straddle words. "gptq_p" stores z and packs in planes (`blocks.unpack_planar`). Sources: AutoGPTQ 0.7.1
`qlinear_cuda_old.py`, GPTQModel 7.7 `nn_modules/qlinear/__init__.py` and `utils/planar_packing.py`.

AWQ in the gemm packing: AutoAWQ, GPTQModel, transformers.

    qweight   int32 (I, O / 8)        codes of 4 bits, packed along the outputs
    qzeros    int32 (G, O / 8)        zero points
    scales    (G, O)                  fp16
    w = (q - z) * s

The bits 4 i to 4 i + 3 of a word hold its output 0, 2, 4, 6, 1, 3, 5, 7 for i from 0 to 7. Source: AutoAWQ 0.2.9
`awq/utils/packing_utils.py`.

Folders of GPTQ and AWQ are written too, for engines that read only those. Codes, zero points and scales are stored as
they are: `load_quantized` gives the same tensors back, bit for bit. A model has one width of codes and one group size.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...dtypes import AffineQuantizedTensor, QuantizedTensor
from ...primitives import CodebookSpec, QuantSpec, ZeroPointDomain
from ...primitives.layouts.packed import pack_dense, unpack_dense
from ..hf_folder import FolderSource, HFFolder, Parts, StoredWeight
from ..save_folder import SaveFormat, register_save_format
from ..sources import register_source
from . import blocks


@dataclass(frozen=True)
class Packing:
    """How codes of some widths are stored: in planes; along the outputs, as those of AWQ; with zero points z - 1
    (`minus_one`), which may have been computed on whole words, so that a zero point of 0 borrows from its neighbour
    (GPTQModel)."""

    minus_one: bool = False
    planar: bool = False
    bits: tuple[int, ...] = (2, 3, 4, 8)
    borrows: bool = False
    along_outputs: bool = False


GPTQ = {
    "gptq": Packing(minus_one=True),
    "gptq_v2": Packing(),
    "gptq_p": Packing(planar=True, bits=(2, 3, 4, 5, 6, 7, 8)),
}
"""By `checkpoint_format`."""

AWQ = Packing(bits=(4,), along_outputs=True)

AUTO_ROUND = {
    "auto_round:auto_gptq": GPTQ["gptq"], "auto_round:gptq": GPTQ["gptq"], "auto_round": GPTQ["gptq_v2"],
    "auto_round:gptqmodel": GPTQ["gptq_v2"], "auto_round:auto_awq": AWQ, "auto_round:awq": AWQ,
}  # fmt: skip
"""By `packing_format`; the first is that of transformers' AutoRoundConfig, for files without one."""


@register_source
class GptqSource(FolderSource):
    """A folder of AutoGPTQ or GPTQModel."""

    format = "gptq"
    methods = ("gptq", "gptqmodel")
    settings = "quantize_config.json"
    marks = r"\.qweight$"

    def find_weights(self) -> dict[str, StoredWeight]:
        config = self.config()
        name = str(config.get("checkpoint_format") or config.get("format") or "gptq")
        if config.get("is_marlin_format"):
            name = "marlin"
        if name not in GPTQ:
            raise ValueError(f"{self.path}: checkpoint_format {name!r:.40} is not read; known: {', '.join(GPTQ)}")
        packing, meta = GPTQ[name], config.get("meta")
        if packing.minus_one and "gptqmodel" in str(meta.get("quantizer") if isinstance(meta, dict) else ""):
            packing = replace(packing, borrows=True)
        return _weights(self, packing, blocks.group_sizes(config))


@register_source
class AwqSource(FolderSource):
    """A folder of AutoAWQ."""

    format = "awq"
    methods = ("awq",)
    settings = "quant_config.json"
    marks = r"\.qweight$"

    def find_weights(self) -> dict[str, StoredWeight]:
        config = self.config()
        version = str(config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm")
        if version.lower() != "gemm":
            raise ValueError(f"{self.path}: AWQ of version {version!r:.40} is not read, only 'gemm'")
        bits = config.get("bits", config.get("w_bit", 4))
        if bits != 4:
            raise ValueError(f"{self.path}: AWQ of {bits!r:.40} bits is not read, only 4; use the format gptq")
        return _weights(self, AWQ, blocks.group_sizes(config))


@register_source
class AutoRoundSource(FolderSource):
    """A folder of AutoRound: the packings of GPTQ and AWQ under another `quant_method`. Layers of other widths are
    found by the shapes of their tensors; `extra_config` gives their group sizes. Source: auto-round 0.16
    `auto_round/inference/backend.py`."""

    format = "auto-round"
    methods = ("auto-round", "intel/auto-round")

    def find_weights(self) -> dict[str, StoredWeight]:
        config = self.config()
        packing = str(config.get("packing_format") or next(iter(AUTO_ROUND)))
        if packing not in AUTO_ROUND:
            raise ValueError(f"{self.path}: packing_format is {packing!r:.60}, which is not read")
        return _weights(self, AUTO_ROUND[packing], blocks.group_sizes(config))


def _weights(source: FolderSource, packing: Packing, sizes: Sequence[int]) -> dict[str, StoredWeight]:
    """Every weight of a folder; `sizes` are the group sizes that the configuration names."""
    names = blocks.with_suffix(source.folder, ".qweight")
    return {f"{name}.weight": _weight(source, name, packing, sizes) for name in names}


def _weight(source: FolderSource, name: str, packing: Packing, sizes: Sequence[int]) -> StoredWeight:
    folder = source.folder
    rows, columns = blocks.check_stored(folder, f"{name}.qweight", [torch.int32], (None, None)).shape
    scale_dtype, (groups, outputs), *_ = blocks.check_stored(folder, f"{name}.scales", blocks.FLOATS, (None, None))
    tensors = [f"{name}.qweight", f"{name}.qzeros", f"{name}.scales"]
    if packing.along_outputs:
        bits, inputs = 4, rows
        blocks.check_stored(folder, f"{name}.scales", blocks.FLOATS, (groups, columns * blocks.WORD // bits))
        blocks.check_stored(folder, f"{name}.qzeros", [torch.int32], (groups, columns))
    else:
        blocks.check_stored(folder, f"{name}.scales", blocks.FLOATS, (groups, columns))
        words = blocks.check_stored(folder, f"{name}.qzeros", [torch.int32], (groups, None)).shape[1]
        bits = words * blocks.WORD // outputs if outputs else 0
        if bits not in packing.bits or bits * outputs != words * blocks.WORD or rows * blocks.WORD % bits:
            raise ValueError(
                f"{folder.file_of(tensors[0])}: {name}.qweight has shape {(rows, outputs)} and {name}.qzeros "
                f"{(groups, words)}, which is no packing of codes of {', '.join(map(str, packing.bits))} bits"
            )
        inputs = rows * blocks.WORD // bits
        if f"{name}.g_idx" in folder.stored:
            blocks.check_stored(folder, f"{name}.g_idx", [torch.int32, torch.int64], (inputs,))
            tensors.append(f"{name}.g_idx")
    with folder.naming(f"{name}.qweight"):
        cut = blocks.Cut.of(inputs, blocks.block_of_groups(inputs, groups, sizes))
    spec = blocks.integer_spec(bits, cut.granularity, scale_dtype)
    scheme = blocks.weight_only(spec, (outputs, inputs), source.dtype_of(scale_dtype))
    return StoredWeight(tuple(tensors), scheme, lambda: _read(folder, tensors, packing, bits, outputs, cut))


def _read(folder: HFFolder, names: Sequence[str], packing: Packing, bits: int, outputs: int, cut: blocks.Cut) -> Parts:
    words, of_zeros, scale, *order = (folder.read(name) for name in names)
    if packing.along_outputs:
        codes, zeros = _unpack_awq(words), _unpack_awq(of_zeros)
    else:
        if order:
            _check_order(order[0], cut.block)
        unpack = blocks.unpack_planar if packing.planar else unpack_dense
        codes, zeros = unpack(words.t(), bits, cut.size), unpack(of_zeros, bits, outputs)
        zeros = (_plus_one(of_zeros, zeros, bits, outputs, packing.borrows) if packing.minus_one else zeros).t()
    return codes, {"scale": cut.copies(scale.t(), 1).contiguous(), "zero_point": cut.copies(zeros, 1).contiguous()}


def _plus_one(words: Tensor, stored: Tensor, bits: int, outputs: int, borrows: bool) -> Tensor:
    """The zero points of stored ones, which are one less; the largest code is 0 - 1, or the largest plus one."""
    if not bool((stored == 2**bits - 1).any()):
        return stored + 1
    if borrows and blocks.WORD % bits == 0:
        ones = sum(1 << shift for shift in range(0, blocks.WORD, bits))
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


def _unpack_awq(words: Tensor) -> Tensor:
    """int32 (I, W) -> uint8 (8 W, I), outputs in order."""
    rows = words.t().contiguous()
    nibble_of_output = (0, 4, 1, 5, 2, 6, 3, 7)
    codes = [((rows >> (4 * nibble)) & 0xF).to(torch.uint8) for nibble in nibble_of_output]
    return torch.stack(codes, 1).flatten(0, 1)


_OUTPUT_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that AWQ puts into each nibble of a word."""


class _GroupedFormat(SaveFormat):
    """What both formats ask of a model."""

    bits: ClassVar[tuple[int, ...]]

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.first: tuple[str, dict[str, Any]] | None = None
        self.floats: list[str] = []

    def store(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        layer, _, last = name.rpartition(".")
        if not isinstance(tensor, QuantizedTensor):
            if last == "weight" and tensor.dim() == 2:
                self.floats.append(layer)
            return {name: tensor}
        if problem := self._problem_of(tensor, last):
            bits, nearest = tensor.scheme.weight.dtype.bits, "int8_weight_only(group_size=128, scale_dtype=...)"
            if bits <= 4 or 8 not in self.bits:
                nearest = "int4_weight_only(group_size=128)"
            raise ValueError(f"{self.name}: {name} {problem}; quantize with {nearest}")
        codes, others = tensor.canonical()
        bits, (rows, inputs) = tensor.scheme.weight.dtype.bits, codes.shape
        groups = others["scale"].shape[1]
        zero_point = others.get("zero_point")
        if codes.dtype is torch.int8:
            codes = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
        sym, middle = zero_point is None, 2 ** (bits - 1)
        zeros = torch.full((rows, groups), middle, dtype=torch.int16, device=codes.device)
        if zero_point is not None:
            shift = middle if tensor.scheme.weight.dtype.is_signed else 0
            zeros = zero_point.expand(rows, groups).to(torch.int16) + shift
        size = inputs // groups
        if groups == 1 and not (self.first and self.first[1]["group_size"] == size):
            size = -1  # one group a row, unless the folder has groups of this size
        found = {"bits": bits, "group_size": size, "sym": sym}
        self.first = self.first or (name, found)
        if found != self.first[1]:
            raise ValueError(
                f"{self.name}: {name} has {found}, and {self.first[0]} {self.first[1]}; a folder has one of each: "
                "quantize all layers alike, or write format='compressed-tensors'"
            )
        try:
            packed = self._packed(codes, zeros, bits)
        except ValueError as error:
            raise ValueError(f"{self.name}: {name} {error}") from error
        return {f"{layer}.{key}": each for key, each in {**packed, "scales": others["scale"].t().contiguous()}.items()}

    def _problem_of(self, tensor: QuantizedTensor, last: str) -> str | None:
        scheme = tensor.scheme
        spec: Any = scheme.weight
        if type(tensor) is not AffineQuantizedTensor or tensor.dim() != 2 or last != "weight":
            return f"is a {type(tensor).__name__} of {tensor.dim()} axes, and the format has weights of linear layers"
        if type(spec) not in (QuantSpec, CodebookSpec):
            return f"is {spec}, and the format has integers times a scale"
        if spec.dtype.is_floating_point or spec.dtype.bits not in self.bits:
            return f"has codes in {spec.dtype}, and the format has integers of {', '.join(map(str, self.bits))} bits"
        codes, others = tensor.canonical()
        if others.keys() - {"scale", "zero_point"}:
            return f"has more than scales and zero points: {', '.join(sorted(others))}"
        if scheme.spec.activation is not None:
            return "quantizes its activations, and the format has weights alone"
        if "zero_point" in others and spec.zero_point_domain is not ZeroPointDomain.INT:
            return "has zero points that are real numbers, and the format has codes"
        scale = others["scale"]
        if scale.shape[0] != codes.shape[0]:
            return f"has scales {tuple(scale.shape)} for codes {tuple(codes.shape)}, and the format has them by row"
        if scale.dtype is not tensor.dtype:
            return f"has scales in {scale.dtype}, and engines keep them in {tensor.dtype}, that of the model"
        if codes.shape[0] % 32 or codes.shape[1] % 32:
            return f"has shape {tuple(codes.shape)}, and the format packs multiples of 32"
        return None

    @abstractmethod
    def _packed(self, codes: Tensor, zeros: Tensor, bits: int) -> dict[str, Tensor]:
        """`qweight` and `qzeros`, and further tensors, of codes (O, I) and zero points (O, G) that count from 0."""

    def progress(self) -> Any:
        return None

    def resume(self, progress: Any) -> None:
        # What all layers have in common would be that of the journal, which may be anybody's.
        raise ValueError(f"{self.name}: a folder of this format is not continued")

    def _settings(self) -> dict[str, Any]:
        return dict(self.first[1]) if self.first else {"bits": self.bits[0], "group_size": -1, "sym": True}


@register_save_format
class GptqFormat(_GroupedFormat):
    """Integers of 2, 3, 4 or 8 bits; `checkpoint_format` is "gptq", which stores zero points z - 1, or "gptq_v2"."""

    name = "gptq"
    bits = (2, 3, 4, 8)

    def __init__(self, config: Mapping[str, Any] | None = None, checkpoint_format: str = "gptq") -> None:
        super().__init__(config)
        if checkpoint_format not in ("gptq", "gptq_v2"):
            raise ValueError(f"gptq: checkpoint_format is {checkpoint_format!r:.40}, want 'gptq' or 'gptq_v2'")
        self.checkpoint_format = checkpoint_format

    def _packed(self, codes: Tensor, zeros: Tensor, bits: int) -> dict[str, Tensor]:
        inputs = codes.shape[1]
        stored = zeros.t() - int(GPTQ[self.checkpoint_format].minus_one)
        if bool((stored < 0).any()):
            raise ValueError(
                "has zero points of 0, which 'gptq' cannot store as z - 1: save it in the format 'qtorch', then "
                "convert_checkpoint(..., format='gptq', options={'checkpoint_format': 'gptq_v2'})"
            )
        return {
            "qweight": pack_dense(codes, bits).t().contiguous(),
            "qzeros": pack_dense(stored.to(torch.uint8), bits),
            "g_idx": torch.arange(inputs, dtype=torch.int32, device="cpu") // (inputs // zeros.shape[1]),
        }

    def config(self) -> dict[str, Any]:
        more = {"desc_act": False, "lm_head": False, "checkpoint_format": self.checkpoint_format}
        return {"quant_method": "gptq", **self._settings(), **more}


@register_save_format
class AwqFormat(_GroupedFormat):
    """Integers of 4 bits, in the gemm packing."""

    name = "awq"
    bits = (4,)

    def _packed(self, codes: Tensor, zeros: Tensor, bits: int) -> dict[str, Tensor]:
        order = [8 * word + output for word in range(codes.shape[0] // 8) for output in _OUTPUT_OF_NIBBLE]
        packed = (pack_dense(each.t()[:, order].to(torch.uint8).contiguous(), bits) for each in (codes, zeros))
        return dict(zip(("qweight", "qzeros"), packed, strict=True))

    def config(self) -> dict[str, Any]:
        settings = self._settings()
        more = {"zero_point": True, "version": "gemm", "modules_to_not_convert": sorted(self.floats) or None}
        return {"quant_method": "awq", "bits": settings["bits"], "group_size": settings["group_size"], **more}
