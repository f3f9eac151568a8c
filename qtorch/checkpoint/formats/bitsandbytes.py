"""The format of bitsandbytes, as transformers stores it."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...primitives import NF4_TABLE, CodebookSpec, PerGroup, PerRow, files, qdtype
from ..hf_folder import DTYPES, FolderSource, HFFolder, Parts, StoredWeight
from ..sources import register_source
from .blocks import Cut, check_stored, symmetric_spec, unpack_nibbles, weight_only, with_suffix

_STATE = ".quant_state.bitsandbytes__"
_MAX_STATE = 100_000
"""Bytes of the JSON text of a weight."""

_BYTES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
"""Dtypes in which codes may be stored (bnb_4bit_quant_storage)."""

_FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
"""In twelfths; the fourth bit of a code is the sign."""


def _fp4_values() -> torch.Tensor:
    magnitudes = torch.tensor(_FP4_MAGNITUDES, dtype=torch.float32, device="cpu") / 12
    return torch.cat([magnitudes, -magnitudes])


TABLES = {"nf4": NF4_TABLE, "fp4": (*sorted({value + 0.0 for value in _fp4_values().tolist()}), 2.0)}
"""Ascending tables by `quant_type`. Zero of FP4 has two codes in bitsandbytes, one here; its last entry is not used."""


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
        outputs, inputs = check_stored(folder, weight, [torch.int8], (None, None)).shape
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


def _absmax(folder: HFFolder, name: str, state: QuantState) -> torch.Tensor:
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
    with files.naming("its quant_state is not JSON"):
        data: Any = files.parse_json(bytes(folder.read(name).tolist()).decode())
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
