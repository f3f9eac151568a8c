"""The types of GGUF: each is an entry of `TYPES`, with the spec of its tensors and the fields of its blocks.

A block holds 32 or 256 consecutive elements of a row. With d, m and dmin in fp16, and sc and mn integers of few bits,

    Q8_0, Q5_0, Q4_0              w = q * d
    Q5_1, Q4_1                    w = q * d + m
    Q6_K, Q3_K                    w = q * (d * sc)                 a signed sc for 16 elements
    Q5_K, Q4_K, Q2_K              w = q * (d * sc) - dmin * mn     sc and mn for 32 elements, in Q2_K for 16
    TQ1_0, TQ2_0                  w = q * d                        q in {-1, 0, 1}
    IQ4_NL, IQ4_XS                w = table[q] * d,                w = table[q] * (d * sc)
    MXFP4                         w = q * 2^(e - 127)              q in e2m1

Scales stay as they are stored: d, m and dmin in fp16, sc and mn as codes of scales (`QuantSpec.scale_spec`), a byte
each. Everything that `gguf.quants.dequantize` computes is computed with the same numbers in fp32, in the same order.

`type_of` and `encode` write a tensor code for code. It is of a type if `gguf.quants.dequantize` of its blocks gives the
same numbers, bit for bit. Its groups may be larger than the blocks, each of which then gets a copy of the scale; zero
points that are codes are subtracted from the codes. Scales have to be numbers of fp16: rounding them here would move
the numbers that codes were chosen for.

Source: ggml/src/ggml-quants.c and ggml-common.h.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....dtypes import QuantizedTensor, quantized_type
from ....primitives import CodebookSpec, MappingType, PerGroup, QuantSpec, Scheme, ZeroPointDomain, qdtype
from ....recipes import gguf
from ....recipes.gguf import K, scaled_codes, with_offset
from ..blocks import weight_only


class Field(NamedTuple):
    """Bytes of a block that hold numbers of `Parts`: fp16, or E8M0 in one byte. With `bits`, codes of so many bits, of
    each `run` bytes first their lowest bits, then the next; they are the bits from `low` on of the codes of a part, or
    of several, one after the other. What is in `SPECIAL` has a packing of its own."""

    nbytes: int
    part: str
    bits: int = 0
    run: int = 1
    low: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of numbers."""
        return torch.float16 if self.nbytes > 1 else torch.float8_e8m0fnu

    def read(self, data: Tensor) -> dict[str, Tensor]:
        """What the bytes (blocks, nbytes) say of each part."""
        if self.part in SPECIAL:
            return SPECIAL[self.part].read(data)
        if not self.bits:
            if self.nbytes == 1 and bool((data == 255).any()):
                raise ValueError("it has blocks with the exponent 255, which is NaN in the OCP specification")
            numbers = data.contiguous().view(self.dtype)
            return {self.part: -numbers if self.part == "zero_point_scale" else numbers}
        runs, mask = data.unflatten(1, (-1, self.run)), 2**self.bits - 1
        codes = torch.stack([(runs >> shift) & mask for shift in range(0, 8, self.bits)], 2).flatten(1) << self.low
        names = self.part.split()
        return dict(zip(names, codes.chunk(len(names), 1), strict=True))

    def write(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `read`: bytes (blocks, nbytes), from codes that count from zero."""
        if self.part in SPECIAL:
            return SPECIAL[self.part].write(parts)
        if not self.bits:
            numbers = -parts[self.part] if self.part == "zero_point_scale" else parts[self.part]
            return numbers.to(self.dtype).contiguous().view(torch.uint8)
        codes = torch.cat([parts[name] for name in self.part.split()], 1) >> self.low & 2**self.bits - 1
        places = codes.unflatten(1, (-1, 8 // self.bits, self.run))
        packed = places[:, :, 0]
        for index in range(1, 8 // self.bits):
            packed = packed | places[:, :, index] << self.bits * index
        return packed.flatten(1)


class Mins:
    """8 scales and 8 minima of 6 bits: the first 4 of each in 4 bytes, whose highest 2 bits belong to the others."""

    @staticmethod
    def read(data: Tensor) -> dict[str, Tensor]:
        scale, least, low = data.split(4, 1)
        scales = torch.cat([scale & 63, low & 15 | scale >> 2 & 48], 1)
        return {"scale": scales, "zero_point": torch.cat([least & 63, low >> 4 | least >> 2 & 48], 1)}

    @staticmethod
    def write(parts: Mapping[str, Tensor]) -> Tensor:
        scale, least = parts["scale"], parts["zero_point"]
        high = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scale, least)]
        return torch.cat([*high, scale[:, 4:] & 15 | (least[:, 4:] & 15) << 4], 1)


class Digits:
    """Five digits of base 3 in a byte, in the last 4 bytes four, as a fraction of 256, the least that begins with these
    digits: the next digit is what a multiplication by 3 carries."""

    RUNS = ((32, 5), (16, 5), (4, 4))
    """(bytes, digits in each)."""

    @classmethod
    def read(cls, data: Tensor) -> dict[str, Tensor]:
        powers = data.new_tensor([1, 3, 9, 27, 81]).reshape(1, 5, 1)
        pairs = zip(data.split([run for run, _ in cls.RUNS], 1), cls.RUNS, strict=True)
        fractions = [(field.unsqueeze(1) * powers[:, :count]).flatten(1) for field, (_, count) in pairs]
        return {"codes": ((torch.cat(fractions, 1).to(torch.int16) * 3) >> 8).to(torch.uint8)}

    @classmethod
    def write(cls, parts: Mapping[str, Tensor]) -> Tensor:
        digits, fields = parts["codes"].to(torch.int32).split([run * count for run, count in cls.RUNS], 1), []
        for (run, count), rows in zip(cls.RUNS, digits, strict=True):
            powers = rows.new_tensor([81, 27, 9, 3, 1])[:count].reshape(1, -1, 1)
            fields.append((((rows.unflatten(1, (-1, run)) * powers).sum(1) * 256 + 242) // 243).to(torch.uint8))
        return torch.cat(fields, 1)


SPECIAL: dict[str, Any] = {"mins": Mins, "digits": Digits}


@dataclass(frozen=True, eq=False)
class BlockType:
    """A type of GGUF: elements of a block, the fields of its bytes, and the spec of its tensors. Codes of parts in
    `zeros` are signed, and stored with so much added. Plain numbers have a `dtype` in place of a spec; what cannot be
    kept has neither, and of its fields the number of bytes alone."""

    name: str
    size: int
    fields: tuple[Field, ...] | int
    spec: QuantSpec | CodebookSpec | None = None
    zeros: Mapping[str, int] = field(default_factory=dict)
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.fields if isinstance(self.fields, int) else sum(of.nbytes for of in self.fields)

    def row_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a row of a tensor of this shape, which must be whole blocks."""
        if shape[-1] % self.size:
            raise ValueError(f"rows of {self.name} have a multiple of {self.size} elements, got shape {tuple(shape)}")
        return shape[-1] // self.size * self.nbytes

    def tensor_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape."""
        return math.prod(shape[:-1]) * self.row_bytes(shape)

    def scheme(self, shape: Sequence[int]) -> Scheme | None:
        """The scheme of a tensor of this shape; None if it is stored as plain numbers."""
        if self.dtype is not None:
            return None
        if self.spec is None:
            raise ValueError(f"it is stored as {self.name}, which no spec of this package can hold exactly")
        return weight_only(self.spec, shape, torch.float32)

    def tensor(self, data: Tensor, shape: Sequence[int]) -> Tensor:
        """The tensor of this shape from its bytes, uint8: quantized, with logical dtype fp32, or plain numbers."""
        shape = tuple(shape)
        if self.dtype is not None:
            return data.view(self.dtype).reshape(shape)
        scheme = self.scheme(shape)
        assert scheme is not None
        parts = self.decode(data.reshape(-1, self.nbytes))
        groups = (*shape[:-1], shape[-1] // self.size * parts["scale"].shape[1])
        codes = parts.pop("codes").reshape(shape)
        others = {name: part.reshape(-1 if name.endswith("_scale") else groups) for name, part in parts.items()}
        if isinstance(self.spec, CodebookSpec):
            others["table"] = torch.tensor(self.spec.table, dtype=torch.float32, device="cpu")
        return quantized_type(scheme.weight).from_canonical(codes, others, scheme)

    def decode(self, blocks: Tensor) -> dict[str, Tensor]:
        """The parts of blocks (blocks, bytes): codes (blocks, size), scales and zero points (blocks, groups), and where
        those are codes, their scales (blocks, 1)."""
        assert not isinstance(self.fields, int)
        found: dict[str, Tensor] = {}
        for each, data in zip(self.fields, blocks.split([of.nbytes for of in self.fields], 1), strict=True):
            for part, values in each.read(data).items():
                found[part] = found[part] | values if part in found else values
        for part, zero in self.zeros.items():
            if self.spec is not None and getattr(self.spec, "mapping", None) is MappingType.ASYMMETRIC:
                found["zero_point"] = torch.full_like(found["scale"], zero, dtype=torch.uint8)
            else:
                found[part] = (found[part] - zero).view(torch.int8)
        return found

    def encode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `decode`, of codes without zero points that are codes."""
        assert not isinstance(self.fields, int)
        codes = {name: part.to(torch.int16) for name, part in parts.items() if not part.dtype.is_floating_point}
        shifted = {name: (part + self.zeros.get(name, 0)).to(torch.uint8) for name, part in codes.items()}
        return torch.cat([of.write({**parts, **shifted}) for of in self.fields], 1)


_HALF, _POWER = torch.float16, torch.float8_e8m0fnu


_IQ4_XS = CodebookSpec(qdtype("uint4"), PerGroup(32), gguf.IQ4_TABLE, scale_spec=scaled_codes("int6", K // 32))
_TERNARY = QuantSpec(qdtype("uint2"), PerGroup(K), MappingType.ASYMMETRIC, scale_dtype=_HALF)

_D, _M, _OF_SCALES, _OF_MINS = (Field(2, part) for part in ("scale", "zero_point", "scale_scale", "zero_point_scale"))
_CODES_4, _HIGH_BIT = Field(16, "codes", 4, 16), Field(4, "codes", 1, 1, low=4)
_K_4, _K_2 = Field(K // 2, "codes", 4, 32), Field(K // 4, "codes", 2, 32)
_OF_K, _MINS = (_OF_SCALES, _OF_MINS), Field(12, "mins")
_Q3_K = (Field(K // 8, "codes", 1, 32, 2), _K_2, Field(8, "scale", 4, 8), Field(4, "scale", 2, 4, 4), _OF_SCALES)
_Q6_K = (Field(K // 2, "codes", 4, 64), Field(K // 4, "codes", 2, 32, 4), Field(K // 16, "scale", 8, 16), _OF_SCALES)
_XS = (_OF_SCALES, Field(2, "scale", 2, 1, 4), Field(K // 64, "scale", 4), Field(K // 2, "codes", 4, 16))

TYPES = {
    0: BlockType("F32", 1, 4, dtype=torch.float32),
    1: BlockType("F16", 1, 2, dtype=torch.float16),
    2: BlockType("Q4_0", 32, (_D, _CODES_4), scaled_codes("int4", 32), {"codes": 8}),
    3: BlockType("Q4_1", 32, (_D, _M, _CODES_4), with_offset("uint4", 32)),
    6: BlockType("Q5_0", 32, (_D, _HIGH_BIT, _CODES_4), scaled_codes("int5", 32), {"codes": 16}),
    7: BlockType("Q5_1", 32, (_D, _M, _HIGH_BIT, _CODES_4), with_offset("uint5", 32)),
    8: BlockType("Q8_0", 32, (_D, Field(32, "codes", 8, 32)), scaled_codes("int8", 32), {"codes": 0}),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", K, (Field(16, "scale zero_point", 4, 16), _K_2, *_OF_K), gguf.GgufQ2_K.of_type),
    11: BlockType("Q3_K", K, _Q3_K, gguf.GgufQ3_K.of_type, {"codes": 4, "scale": 32}),
    12: BlockType("Q4_K", K, (*_OF_K, _MINS, _K_4), gguf.GgufQ4_K.of_type),
    13: BlockType("Q5_K", K, (*_OF_K, _MINS, Field(K // 8, "codes", 1, 32, 4), _K_4), gguf.GgufQ5_K.of_type),
    14: BlockType("Q6_K", K, _Q6_K, gguf.GgufQ6_K.of_type, {"codes": 32, "scale": 0}),
    15: BlockType("Q8_K", K, 292),
    16: BlockType("IQ2_XXS", K, 66),
    17: BlockType("IQ2_XS", K, 74),
    18: BlockType("IQ3_XXS", K, 98),
    19: BlockType("IQ1_S", K, 50),
    20: BlockType("IQ4_NL", 32, (_D, _CODES_4), gguf.GgufIQ4_NL().linear_spec().weight),
    21: BlockType("IQ3_S", K, 110),
    22: BlockType("IQ2_S", K, 82),
    23: BlockType("IQ4_XS", K, _XS, _IQ4_XS, {"scale": 32}),
    24: BlockType("I8", 1, 1, dtype=torch.int8),
    25: BlockType("I16", 1, 2, dtype=torch.int16),
    26: BlockType("I32", 1, 4, dtype=torch.int32),
    27: BlockType("I64", 1, 8, dtype=torch.int64),
    28: BlockType("F64", 1, 8, dtype=torch.float64),
    29: BlockType("IQ1_M", K, 56),
    30: BlockType("BF16", 1, 2, dtype=torch.bfloat16),
    34: BlockType("TQ1_0", K, (Field(52, "digits"), _D), scaled_codes("int2", K), {"codes": 1}),
    35: BlockType("TQ2_0", K, (_K_2, _D), _TERNARY, {"codes": 1}),
    39: BlockType("MXFP4", 32, (Field(1, "scale"), _CODES_4), scaled_codes("float4_e2m1", 32, _POWER)),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}
"""Every type of ggml, by its number."""

ENCODED = {kind.name: kind for kind in sorted(TYPES.values(), key=lambda kind: kind.nbytes / kind.size) if kind.spec}
"""The types of quantized tensors by name, the smallest first."""

NUMBERS = {kind.name: number for number, kind in TYPES.items()}

SIGNED = {"TQ1_0": (-1, 1), "TQ2_0": (-1, 2), "Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
"""The codes of types of integers without an offset."""


def type_of(tensor: QuantizedTensor) -> tuple[str, Tensor]:
    """(type, blocks): the type that the tensor was read from, else the smallest that it is of; `encode`.

    Raises:
        ValueError: it is of none; the message says why it is not of the largest that has such codes.
    """
    spec = tensor.scheme.weight
    names = [name for name, kind in ENCODED.items() if _numbers(kind.spec) == _numbers(spec)]
    if not names:
        raise ValueError(f"no type of GGUF has the numbers of {spec}")
    plain = tensor.canonical()
    for name in sorted(names, key=lambda name: ENCODED[name].spec != spec):
        try:
            return name, _blocks(tensor, name, *plain)
        except ValueError as found:
            error = found
    raise error


def encode(tensor: QuantizedTensor, name: str) -> Tensor:
    """The blocks of type `name` of a tensor, uint8 (*shape[:-1], bytes of a row).

    Raises:
        ValueError: the tensor is not of this type; the message says why.
    """
    return _blocks(tensor, name, *tensor.canonical())


def _blocks(tensor: QuantizedTensor, name: str, codes: Tensor, others: dict[str, Tensor]) -> Tensor:
    """`encode` of a tensor with these codes and scales, which take long to unpack."""
    kind, spec, shape = ENCODED[name], tensor.scheme.weight, tuple(tensor.shape)
    row = kind.row_bytes(shape)
    if "up" in others:
        raise ValueError("it has a branch of low rank, which no type has; save_quantized(model, path) keeps it")
    if _numbers(spec) != _numbers(kind.spec) or tuple(codes.shape) != shape:
        raise ValueError(f"{name} has other numbers than {spec}")
    if not codes.numel():
        return codes.new_empty(*shape[:-1], row, dtype=torch.uint8)
    parts = _parts(kind, codes, others) if spec.scale_spec else _with_scales(kind, spec, codes, others)
    return kind.encode(parts).reshape(*shape[:-1], row)


def _numbers(spec: Any) -> tuple[Any, ...]:
    """What two specs have in common if a type may hold the numbers of both: how reals follow from codes."""
    if spec.scale_spec is not None:
        domain = spec.zero_point_domain if spec.has_zero_point else None
        return type(spec), spec.dtype, spec.granularity, getattr(spec, "table", domain), _numbers(spec.scale_spec)
    if isinstance(spec, CodebookSpec):
        return (spec.table,)
    kind = spec.dtype if spec.dtype.is_floating_point else "integers"
    integer = not spec.has_zero_point or spec.zero_point_domain is ZeroPointDomain.INT
    return type(spec), kind, None if integer else spec.zero_point_domain


def _parts(kind: BlockType, codes: Tensor, others: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts of a type whose scales are codes."""
    blocks = codes.numel() // kind.size
    found = {name: part.reshape(blocks, -1) for name, part in others.items() if name != "table"}
    halves = {name: _halves_of(part, "scales of scales") for name, part in found.items() if name.endswith("_scale")}
    return {"codes": codes.reshape(blocks, -1), **found, **halves}


def _with_scales(kind: BlockType, spec: Any, codes: Tensor, others: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts of a type whose blocks have one scale, and one offset, in floating point."""
    group = spec.block_size(codes.shape)
    if group[-1] % kind.size:
        raise ValueError(f"its groups have {group[-1]} elements, blocks of {kind.name} {kind.size}")

    def of_blocks(name: str) -> Tensor:
        values = others[name]
        for axis, size in enumerate((*group[:-1], group[-1] // kind.size)):
            values = values.repeat_interleave(size, axis)
        return values.reshape(-1, 1)

    codes, found = codes.reshape(-1, kind.size), {}
    if "zero_point" in others and not spec.zero_point_domain.adds_zero_point:
        codes = codes.to(torch.int16) - of_blocks("zero_point").to(torch.int16)
    elif "zero_point" in others:
        found["zero_point"] = _halves_of(of_blocks("zero_point"), "offsets")
    low, high = SIGNED.get(kind.name, (0, 2**kind.spec.dtype.bits - 1))  # type: ignore[union-attr]
    if int(codes.min()) < low or int(codes.max()) > high:
        raise ValueError(f"its codes reach from {int(codes.min())} to {int(codes.max())}, those of {kind.name} {high}")
    scale = of_blocks("scale")
    if kind.name != "MXFP4":
        return {"codes": codes, "scale": _halves_of(scale, "scales"), **found}
    if scale.dtype is not torch.float8_e8m0fnu or bool((scale.view(torch.uint8) == 255).any()):
        raise ValueError("its scales are no powers of two from 2^-127 to 2^127")
    return {"codes": codes, "scale": scale}


def _halves_of(values: Tensor, what: str) -> Tensor:
    halves = values.to(torch.float16)
    if not torch.equal(halves.float(), values.float()):
        raise ValueError(f"its {what}, in {str(values.dtype).removeprefix('torch.')}, are not numbers of fp16")
    return halves
