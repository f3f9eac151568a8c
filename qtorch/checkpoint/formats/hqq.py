"""The format of HQQ, as its layers and transformers store it."""

import math
import re

import torch

from ...primitives import MappingType, QuantSpec, ZeroPointDomain, qdtype
from ..hf_folder import FolderSource, HFFolder, Parts, StoredWeight
from ..sources import register_source
from .blocks import FLOATS, Cut, check_stored, weight_only, with_suffix

_SETTINGS = re.compile(
    "nbits|axis|shape|packing|group_size|view_as_float|unpack_view_dtype|compute_dtype|quant_scale|quant_zero|"
    "offload_meta|encoded_state_dict|stores_quant_config|channel_wise|optimize|round_zero"
)
_MAX_SETTING = 1000
"""Bytes of a setting."""

_PACKINGS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4), "1bit_u8": (1, 8)}
"""(bits of a code, codes in a byte or in an int32), by `packing`; the first is in the highest bits that are used."""


@register_source
class HqqSource(FolderSource):
    """HQQ, as its layers and transformers' HqqConfig store it: `quant_method` "hqq".

        W_q           codes in groups (numel / g, g), packed along their first axis: for 4 bits, the first half of the
                      rows in the high nibbles of the bytes, the second half in the low ones; 2 and 1 bits likewise; 3
                      bits in tenths of the rows, in int32; 5, 6 and 8 bits, a byte each
        scale, zero   (numel / g, 1), zero is a real number
        nbits, axis, shape, packing, view_as_float, ...   tensors with one setting each, text as bytes
        w = (q - zero) * scale

    This is the zero-point domain FRACTIONAL, computed in fp32; HQQ computes in the dtype of the scale and rounds more
    often. Groups along the first axis (axis=0) are refused. Source: hqq 0.2.8 `core/quantize.py`, `core/bitpack.py`.
    """

    format = "hqq"
    methods = ("hqq",)
    marks = r"\.W_q$"

    def find_weights(self) -> dict[str, StoredWeight]:
        return {f"{name}.weight": self._weight(name) for name in with_suffix(self.folder, ".W_q")}

    def ignored(self) -> set[str]:
        layers, names = set(with_suffix(self.folder, ".W_q")), [name.rpartition(".") for name in self.folder.stored]
        return {"".join(parts) for parts in names if parts[0] in layers and _SETTINGS.fullmatch(parts[2])}

    def _weight(self, name: str) -> StoredWeight:
        folder, codes = self.folder, f"{name}.W_q"
        where = f"{folder.file_of(codes)}: {codes}"
        if _number(folder, f"{name}.axis", 1) != 1:
            raise ValueError(f"{where} has axis=0, groups of elements of many rows; quantize with axis=1")
        if _number(folder, f"{name}.quant_zero", 0) or _number(folder, f"{name}.quant_scale", 0):
            raise ValueError(f"{where} has quantized scales or zero points, which are not read; HQQ deprecated them")
        packing = "".join(chr(int(code)) for code in _values(folder, f"{name}.packing") if 0 <= code < 128)
        bits = math.ceil(_number(folder, f"{name}.nbits", 0))
        shape = tuple(map(int, _values(folder, f"{name}.shape")))
        width, per_word = _PACKINGS.get(packing, (0, 0))
        if not 1 <= bits <= width:
            known = ", ".join(_PACKINGS)
            raise ValueError(f"{where} has codes of {bits} bits in the packing {packing!r:.40}; known: {known}")
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(f"{where} has the shape {shape!r:.80}")
        count = math.prod(shape)
        dtype, (groups, _), *_ = check_stored(folder, f"{name}.scale", FLOATS, (None, 1))
        check_stored(folder, f"{name}.zero", [dtype], (groups, 1))
        if not groups or count % groups:
            raise ValueError(f"{where}: {count} codes are not {groups} groups")
        size = count // groups
        rows = -(-groups // per_word)
        nbytes = rows * size * (4 if packing == "3bit_32" else 1)
        if folder.nbytes(codes) != nbytes or (packing != "3bit_32" and groups % per_word):
            raise ValueError(f"{where} has {folder.nbytes(codes)} bytes; {groups} groups of {size} have {nbytes}")
        with folder.naming(codes):
            cut = Cut.of(shape[1], size, flattened=True)
        domain = ZeroPointDomain.FRACTIONAL
        spec = QuantSpec(qdtype(f"uint{bits}"), cut.granularity, MappingType.ASYMMETRIC, domain, scale_dtype=dtype)
        scheme = weight_only(spec, shape, self.dtype_of(dtype))

        def read() -> Parts:
            codes = _unpack(folder.read(f"{name}.W_q"), packing, rows, size)[:groups]
            if int(codes.max()) >= 2**bits:
                raise ValueError(f"one of its codes is {int(codes.max())}, which has more than {bits} bits")
            others = {"scale": folder.read(f"{name}.scale"), "zero_point": folder.read(f"{name}.zero")}
            copies = size // cut.part
            per_part = {key: value.reshape(-1).repeat_interleave(copies) for key, value in others.items()}
            return codes.reshape(shape), {key: value.reshape(shape[0], -1) for key, value in per_part.items()}

        return StoredWeight((codes, f"{name}.scale", f"{name}.zero"), scheme, read)


def _unpack(packed: torch.Tensor, packing: str, rows: int, size: int) -> torch.Tensor:
    """Codes (rows * codes in a word, size) in uint8; see the top of the file."""
    words = packed.reshape(-1).view(torch.int32 if packing == "3bit_32" else torch.uint8).reshape(rows, size)
    width, count = _PACKINGS[packing]
    parts = [(words >> (width * (count - 1 - i))) & (2**width - 1) for i in range(count)]
    return torch.cat(parts).to(torch.uint8)


def _values(folder: HFFolder, name: str) -> list[int | float]:
    """The elements of a small tensor, which is a setting."""
    if name not in folder.stored:
        raise ValueError(f"{folder.path}: {name} is missing; save the model by HQQ 0.2 or by transformers")
    if folder.nbytes(name) > _MAX_SETTING:
        raise ValueError(f"{folder.file_of(name)}: {name} has {folder.nbytes(name)} bytes, which is no setting")
    values: list[int | float] = folder.read(name).reshape(-1).tolist()
    return values


def _number(folder: HFFolder, name: str, default: float) -> float:
    """A setting that is a number; `default` if it is not stored."""
    if name not in folder.stored:
        return default
    values = _values(folder, name)
    if len(values) != 1 or not math.isfinite(values[0]):
        raise ValueError(f"{folder.file_of(name)}: {name} is {values!r:.80}, not a number")
    return values[0]
