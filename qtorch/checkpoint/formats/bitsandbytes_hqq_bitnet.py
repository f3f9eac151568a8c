"""The formats of bitsandbytes, HQQ and BitNet, as transformers stores them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...dtypes import PackedLayout
from ...primitives import AbsMeanRule, CodebookSpec, LinearSpec, MappingType, QuantSpec, ZeroPointDomain
from ...primitives.codebooks import NF4_TABLE
from ...primitives.files import naming, parse_json
from ...primitives.granularity import PerGroup, PerRow
from ...primitives.qdtype import qdtype
from ...primitives.spec import Scheme
from ...recipes.integer import int8_activation
from ..hf_folder import DTYPES, FolderSource, HFFolder, Parts, StoredWeight
from ..sources import register_source
from .blocks import FLOATS, Cut, check_stored, symmetric_spec, unpack_dense, unpack_nibbles, weight_only, with_suffix

_STATE = ".quant_state.bitsandbytes__"
_MAX_STATE = 100_000
"""Bytes of the JSON text of a weight."""

_BYTES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
"""Dtypes in which codes may be stored (bnb_4bit_quant_storage)."""

_FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
"""In twelfths; the fourth bit of a code is the sign."""


def _fp4_values() -> Tensor:
    magnitudes = torch.tensor(_FP4_MAGNITUDES, dtype=torch.float32, device="cpu") / 12
    return torch.cat([magnitudes, -magnitudes])


def _fp4_table() -> tuple[float, ...]:
    """The values of FP4, ascending. Zero has two codes in bitsandbytes and one here; the last entry is not used."""
    return (*sorted({value + 0.0 for value in _fp4_values().tolist()}), 2.0)


TABLES = {"nf4": NF4_TABLE, "fp4": _fp4_table()}
"""Ascending tables by `quant_type`."""


@dataclass(frozen=True)
class QuantState:
    """The validated contents of ``quant_state``."""

    quant_type: str
    shape: tuple[int, ...]
    blocksize: int
    dtype: torch.dtype
    nested_blocksize: int | None
    nested_offset: float


@register_source
class BitsAndBytesSource(FolderSource):
    """bitsandbytes: weights in NF4 and FP4, also with nested scales, and int8.

        4 bits   weight                                   N / 2 bytes, two codes each, the high nibble first
                 weight.absmax                            (N / blocksize) fp32, or uint8 if nested
                 weight.quant_map                         (16) fp32, the table
                 weight.nested_absmax, .nested_quant_map  of absmax, in blocks of nested_blocksize
                 weight.quant_state.bitsandbytes__nf4     JSON text: shape, blocksize, dtype, nested_offset, ...
                 w = table[q] * absmax,    nested: absmax = nested_quant_map[code] * nested_absmax + nested_offset
        8 bits   weight int8 (O, I), SCB fp32 (O)
                 w = q * SCB / 127

    Blocks run over the flattened weight. Nested scales are kept dequantized, in fp32: as they are stored, by a table,
    no `scale_spec` represents them. Of int8, codes are exact; SCB / 127 is rounded to fp32, which bitsandbytes itself
    does in another order. Source: bitsandbytes 0.50 `functional.py` (QuantState), `nn/modules.py`.
    """

    format = "bitsandbytes"
    methods = ("bitsandbytes",)
    marks = r"\.SCB$|\.quant_state\.bitsandbytes__"

    def find_weights(self) -> dict[str, StoredWeight]:
        in_4_bits = [name.split(_STATE) for name in sorted(self.folder.stored) if _STATE in name]
        weights = {name: self._in_4_bits(name, kind) for name, kind in in_4_bits}
        return weights | {f"{name}.weight": self._in_8_bits(name) for name in with_suffix(self.folder, ".SCB")}

    def ignored(self) -> set[str]:
        # The order in which former versions kept int8 codes; only "row" was ever saved.
        return {f"{name}.weight_format" for name in with_suffix(self.folder, ".SCB")}

    def _in_8_bits(self, name: str) -> StoredWeight:
        folder, weight, scb = self.folder, f"{name}.weight", f"{name}.SCB"
        check_stored(folder, weight, [torch.int8], (None, None))
        outputs, inputs = folder.stored[weight].shape
        check_stored(folder, scb, [torch.float32], (outputs,))
        dtype = folder.dtype or torch.float16
        scheme = weight_only(symmetric_spec(torch.int8, PerRow(), torch.float32), (outputs, inputs), dtype)

        def read() -> Parts:
            return folder.read(weight, mmap=self.mmap), {"scale": folder.read(scb).reshape(-1, 1) / 127}

        return StoredWeight((weight, scb), scheme, read)

    def _in_4_bits(self, name: str, kind: str) -> StoredWeight:
        folder = self.folder
        stored_state = f"{name}{_STATE}{kind}"
        check_stored(folder, stored_state, [torch.uint8], (None,))
        with folder.naming(stored_state, name):
            state = _state(folder, stored_state)
            cut = Cut.of(state.shape[-1], state.blocksize, flattened=True)
        count = math.prod(state.shape)
        blocks = -(-count // state.blocksize)
        check_stored(folder, name, _BYTES, [None] * len(folder.stored[name].shape) if name in folder.stored else [])
        if (found := folder.nbytes(name)) != (needed := -(-count // 2)):
            has = f"{name} has {found} bytes, codes of shape {state.shape} take {needed}"
            raise ValueError(f"{folder.file_of(name)}: {has}")
        tensors = [name, stored_state, f"{name}.absmax", f"{name}.quant_map"]
        check_stored(folder, f"{name}.quant_map", [torch.float32], (16,))
        nested = state.nested_blocksize is not None
        check_stored(folder, f"{name}.absmax", [torch.uint8 if nested else torch.float32], (blocks,))
        if state.nested_blocksize is not None:
            check_stored(folder, f"{name}.nested_quant_map", [torch.float32], (256,))
            check_stored(folder, f"{name}.nested_absmax", [torch.float32], (-(-blocks // state.nested_blocksize),))
            tensors += [f"{name}.nested_quant_map", f"{name}.nested_absmax"]
        spec = CodebookSpec(qdtype("uint4"), PerGroup(cut.part), TABLES[kind], scale_dtype=torch.float32)
        scheme = weight_only(spec, state.shape, state.dtype)
        return StoredWeight(tuple(tensors), scheme, lambda: _read(folder, name, state, cut))


def _read(folder: HFFolder, name: str, state: QuantState, cut: Cut) -> Parts:
    values = torch.tensor(NF4_TABLE, dtype=torch.float32, device="cpu") if state.quant_type == "nf4" else _fp4_values()
    if not torch.equal(folder.read(f"{name}.quant_map"), values):
        raise ValueError(f"its quant_map is not the table of {state.quant_type}; quantize the original model")
    count = math.prod(state.shape)
    packed = folder.read(name).reshape(-1).view(torch.uint8)
    if state.quant_type == "fp4":
        # Byte of two codes of bitsandbytes -> byte of two indices into the table.
        indices = [TABLES["fp4"].index(value + 0.0) for value in values.tolist()]
        of_code = torch.tensor(indices, dtype=torch.uint8, device="cpu")
        packed = ((of_code << 4).reshape(-1, 1) | of_code).reshape(-1).index_select(0, packed.int())
    codes = unpack_nibbles(packed, high_first=True)[:count]
    # Parts divide rows and blocks alike, so they are in the order of blocks.
    scale = _absmax(folder, name, state).repeat_interleave(state.blocksize // cut.part)[: count // cut.part]
    return codes.reshape(state.shape), {
        "scale": scale.reshape(*state.shape[:-1], -1),
        "table": torch.tensor(TABLES[state.quant_type], dtype=torch.float32, device="cpu"),
    }


def _absmax(folder: HFFolder, name: str, state: QuantState) -> Tensor:
    """The scales of the blocks, fp32."""
    stored = folder.read(f"{name}.absmax")
    if state.nested_blocksize is None:
        return stored
    outer = folder.read(f"{name}.nested_absmax").repeat_interleave(state.nested_blocksize)[: len(stored)]
    offset = torch.tensor(state.nested_offset, dtype=torch.float32, device="cpu")
    return folder.read(f"{name}.nested_quant_map")[stored.int()] * outer + offset


def _state(folder: HFFolder, name: str) -> QuantState:
    """Read and validate the JSON text of a weight."""
    if folder.nbytes(name) > _MAX_STATE:
        raise ValueError(f"its quant_state has {folder.nbytes(name)} bytes")
    with naming("its quant_state is not JSON"):
        data: Any = parse_json(bytes(folder.read(name).tolist()).decode())
    if not isinstance(data, dict):
        raise ValueError(f"its quant_state is a {type(data).__name__}, not an object")
    kind, shape, dtype = data.get("quant_type"), data.get("shape"), DTYPES.get(str(data.get("dtype")))
    if kind not in TABLES or not name.endswith(f"__{kind}"):
        raise ValueError(f"its quant_type is {kind!r:.40}, known: {', '.join(TABLES)}")
    if not isinstance(shape, list) or not shape or not all(_is_size(size) for size in shape):
        raise ValueError(f"its quant_state has the shape {shape!r:.80}")
    if dtype is None:
        raise ValueError(f"its quant_state has the dtype {data.get('dtype')!r:.40}, known: {', '.join(DTYPES)}")
    sizes = [data.get(key) for key in ("blocksize", "nested_blocksize") if key in data]
    if "blocksize" not in data or not all(_is_size(size) for size in sizes):
        raise ValueError(f"its quant_state has the block sizes {sizes!r:.80}")
    offset = data.get("nested_offset", 0.0)
    if not isinstance(offset, int | float) or not math.isfinite(offset):
        raise ValueError(f"its quant_state has the nested_offset {offset!r:.40}")
    return QuantState(kind, tuple(shape), data["blocksize"], dtype, data.get("nested_blocksize"), float(offset))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**40


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
        check_stored(folder, f"{name}.scale", FLOATS, (None, 1))
        groups, dtype = folder.stored[f"{name}.scale"].shape[0], folder.stored[f"{name}.scale"].dtype
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


def _unpack(packed: Tensor, packing: str, rows: int, size: int) -> Tensor:
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


_SCALE = "_scale"
_PER_BYTE = 4

_TERNARY = QuantSpec(qdtype("int2"), PerRow(), scale_rule=AbsMeanRule(), quant_min=-1, quant_max=1)
_INT8 = replace(int8_activation(PerRow(), MappingType.SYMMETRIC), eps=1e-5 / 127)

_DIVIDES = {"bitlinear": True, "autobitlinear": False}
"""Whether weight_scale divides, by `linear_class`."""


@register_source
class BitnetSource(FolderSource):
    """BitNet b1.58 as transformers stores it: `quant_method` "bitnet".

        weight         uint8 (O / 4, I): bits 2 i and 2 i + 1 of row r hold q + 1 of row i O / 4 + r; or floats (O, I)
        weight_scale   (1)
        w = q / weight_scale     of BitLinear,          q is -1, 0 or 1
        w = q * weight_scale     of AutoBitLinear

    Inputs are quantized on each call, as the model was trained: int8 by token, with the scale max(|x|, 1e-5) / 127. The
    scale of the weight is kept once for each row, in fp32, which integer kernels read; 1 / weight_scale is rounded to
    fp32. Source: transformers 5.23 `integrations/bitnet.py`.
    """

    format = "bitnet"
    methods = ("bitnet",)

    def find_weights(self) -> dict[str, StoredWeight]:
        config = self.config()
        linear_class = config.get("linear_class", "bitlinear")
        if not isinstance(linear_class, str) or linear_class not in _DIVIDES:
            raise ValueError(f"{self.path}: linear_class is {linear_class!r:.40}; known: {', '.join(_DIVIDES)}")
        if config.get("use_rms_norm"):
            raise ValueError(
                f"{self.path}: use_rms_norm puts a norm into each linear layer, which has no place in the model of "
                "transformers; dequantize it there"
            )
        if config.get("quantization_mode", "offline") != "offline":
            raise ValueError(
                f"{self.path}: quantization_mode is {config['quantization_mode']!r:.40}, its weights are floats. "
                "Remove quantization_config from config.json, load it, and call quantize_(model, bitnet_training()), "
                "which trains as transformers does, and quantize_(model, convert())"
            )
        names = [f"{name}.weight" for name in with_suffix(self.folder, f".weight{_SCALE}")]
        return {name: self._weight(name, _DIVIDES[linear_class]) for name in names}

    def _weight(self, name: str, divides: bool) -> StoredWeight:
        folder, scale = self.folder, f"{name}{_SCALE}"
        check_stored(folder, name, (torch.uint8, *FLOATS), (None, None))
        check_stored(folder, scale, FLOATS, (1,))
        (rows, columns), dtype = folder.stored[name].shape, folder.stored[name].dtype
        shape = (rows * _PER_BYTE if dtype is torch.uint8 else rows, columns)
        of_scale = folder.stored[scale].dtype
        scheme = Scheme(LinearSpec(_TERNARY, _INT8, layout=PackedLayout()), shape, self.dtype_of(of_scale))

        def read() -> Parts:
            stored = folder.read(name)
            if dtype is torch.uint8:
                # Codes of a byte are rows that lie apart: (R, I, 4) -> (4, R, I).
                rows = unpack_dense(stored.unsqueeze(-1), 2, _PER_BYTE).movedim(-1, 0)
                stored = rows.reshape(shape).to(torch.int8) - 1
            codes = stored.clamp(-1, 1).to(torch.int8)
            if not torch.equal(codes.to(stored.dtype), stored):
                raise ValueError("one of its codes is not -1, 0 or 1")
            factor = folder.read(scale).float()
            factor = 1 / factor if divides else factor
            if not (factor > 0) & (factor < torch.inf):
                raise ValueError(f"its weight_scale is {folder.read(scale).item()}, which is no scale")
            return codes, {"scale": factor.reshape(1, 1).repeat(shape[0], 1)}

        return StoredWeight((name, scale), scheme, read)
