"""The types of GGUF: each is an entry of `TYPES`, with the spec of its tensors and how its blocks are decoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...dtypes import AffineQuantizedTensor, LUTQuantizedTensor
from ...layouts.plain import smallest_layout
from ...primitives import CodebookSpec, LinearSpec, MappingType, PerGroup, QuantSpec, ZeroPointDomain, qdtype
from ...primitives.scheme import Scheme
from .blocks import DECODERS, K

IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the codes of IQ4_NL and IQ4_XS."""


class BlockType(NamedTuple):
    """A type of GGUF.

    Attributes:
        name: as in llama.cpp.
        size: elements of a block.
        nbytes: bytes of a block.
        spec: of its tensors: a `QuantSpec` or `CodebookSpec`, None for plain numbers and for what cannot be kept.
        dtype: of plain numbers.
    """

    name: str
    size: int
    nbytes: int
    spec: QuantSpec | CodebookSpec | None = None
    dtype: torch.dtype | None = None

    def row_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a row of a tensor of this shape.

        Raises:
            ValueError: a row is not whole blocks.
        """
        if shape[-1] % self.size:
            raise ValueError(
                f"rows of {self.name} have a multiple of {self.size} elements, got the shape {tuple(shape)}"
            )
        return shape[-1] // self.size * self.nbytes

    def tensor_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape."""
        return math.prod(shape[:-1]) * self.row_bytes(shape)

    def scheme(self, shape: Sequence[int]) -> Scheme | None:
        """The scheme of a tensor of this shape; None if it is stored as plain numbers.

        Raises:
            ValueError: no spec holds such a tensor exactly.
        """
        if self.dtype is not None:
            return None
        if self.spec is None:
            raise ValueError(f"it is stored as {self.name}, which no spec of this package can hold exactly")
        return Scheme(_linear_spec(self.spec), tuple(shape), torch.float32)

    def tensor(self, data: Tensor, shape: Sequence[int]) -> Tensor:
        """The tensor of this shape from its bytes, uint8: quantized, with logical dtype fp32, or plain numbers.

        Raises:
            ValueError: no spec holds it exactly.
        """
        shape = tuple(shape)
        if self.dtype is not None:
            return data.view(self.dtype).reshape(shape)
        scheme = self.scheme(shape)
        assert scheme is not None
        parts = DECODERS[self.name](data.reshape(-1, self.nbytes))
        codes = parts.codes.reshape(shape)
        others = {name: part for name, part in parts._asdict().items() if name != "codes" and part is not None}
        for name in ("scale", "zero_point"):
            if name in others:
                others[name] = others[name].reshape(*shape[:-1], shape[-1] // self.size * parts.scale.shape[1])
        for name in ("scale_scale", "zero_point_scale"):
            if name in others:
                others[name] = others[name].reshape(-1)
        if isinstance(self.spec, CodebookSpec):
            others["table"] = torch.tensor(self.spec.table, dtype=torch.float32, device="cpu")
            return LUTQuantizedTensor.from_canonical(codes, others, scheme)
        return AffineQuantizedTensor.from_canonical(codes, others, scheme)


def _linear_spec(spec: QuantSpec | CodebookSpec) -> LinearSpec:
    return LinearSpec(spec, layout=smallest_layout(spec.dtype))


_HALF, _POWER = torch.float16, torch.float8_e8m0fnu


def _scaled_codes(dtype: str, group: int, scale: torch.dtype | None = _HALF, of_scale: str | None = None) -> QuantSpec:
    """q * scale; `of_scale` is the type of scales that are codes."""
    none = ZeroPointDomain.NONE
    scale_spec = _in_super_blocks(of_scale, group)
    return QuantSpec(qdtype(dtype), PerGroup(group), zero_point_domain=none, scale_dtype=scale, scale_spec=scale_spec)


def _with_offset(dtype: str, group: int, scale: torch.dtype | None = _HALF, of_scale: str | None = None) -> QuantSpec:
    """q * scale + offset."""
    return QuantSpec(
        qdtype(dtype),
        PerGroup(group),
        MappingType.ASYMMETRIC,
        ZeroPointDomain.OFFSET,
        scale_dtype=scale,
        preserve_zero=False,
        scale_spec=_in_super_blocks(of_scale, group),
    )


def _in_super_blocks(dtype: str | None, group: int) -> QuantSpec | None:
    if dtype is None:
        return None
    none = ZeroPointDomain.NONE
    return QuantSpec(qdtype(dtype), PerGroup(K // group), zero_point_domain=none, scale_dtype=_HALF)


def _of_table(scale: torch.dtype | None = _HALF, of_scale: str | None = None) -> CodebookSpec:
    scale_spec = _in_super_blocks(of_scale, 32)
    return CodebookSpec(qdtype("uint4"), PerGroup(32), IQ4_TABLE, scale_dtype=scale, scale_spec=scale_spec)


_TERNARY = QuantSpec(qdtype("uint2"), PerGroup(K), MappingType.ASYMMETRIC, scale_dtype=_HALF)

TYPES = {
    0: BlockType("F32", 1, 4, dtype=torch.float32),
    1: BlockType("F16", 1, 2, dtype=torch.float16),
    2: BlockType("Q4_0", 32, 18, _scaled_codes("int4", 32)),
    3: BlockType("Q4_1", 32, 20, _with_offset("uint4", 32)),
    6: BlockType("Q5_0", 32, 22, _scaled_codes("int5", 32)),
    7: BlockType("Q5_1", 32, 24, _with_offset("uint5", 32)),
    8: BlockType("Q8_0", 32, 34, _scaled_codes("int8", 32)),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", K, 84, _with_offset("uint2", 16, None, "uint4")),
    11: BlockType("Q3_K", K, 110, _scaled_codes("int3", 16, None, "int6")),
    12: BlockType("Q4_K", K, 144, _with_offset("uint4", 32, None, "uint6")),
    13: BlockType("Q5_K", K, 176, _with_offset("uint5", 32, None, "uint6")),
    14: BlockType("Q6_K", K, 210, _scaled_codes("int6", 16, None, "int8")),
    15: BlockType("Q8_K", K, 292),
    16: BlockType("IQ2_XXS", K, 66),
    17: BlockType("IQ2_XS", K, 74),
    18: BlockType("IQ3_XXS", K, 98),
    19: BlockType("IQ1_S", K, 50),
    20: BlockType("IQ4_NL", 32, 18, _of_table()),
    21: BlockType("IQ3_S", K, 110),
    22: BlockType("IQ2_S", K, 82),
    23: BlockType("IQ4_XS", K, 136, _of_table(None, "int6")),
    24: BlockType("I8", 1, 1, dtype=torch.int8),
    25: BlockType("I16", 1, 2, dtype=torch.int16),
    26: BlockType("I32", 1, 4, dtype=torch.int32),
    27: BlockType("I64", 1, 8, dtype=torch.int64),
    28: BlockType("F64", 1, 8, dtype=torch.float64),
    29: BlockType("IQ1_M", K, 56),
    30: BlockType("BF16", 1, 2, dtype=torch.bfloat16),
    34: BlockType("TQ1_0", K, 54, _scaled_codes("int2", K)),
    35: BlockType("TQ2_0", K, 66, _TERNARY),
    39: BlockType("MXFP4", 32, 17, _scaled_codes("float4_e2m1", 32, _POWER)),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}
"""Every type of ggml, by its number."""


def block_type(number: int) -> BlockType:
    """The type with this number.

    Raises:
        ValueError: there is none.
    """
    if number not in TYPES:
        raise ValueError(f"it has the type {number}; known are {', '.join(kind.name for kind in TYPES.values())}")
    return TYPES[number]
