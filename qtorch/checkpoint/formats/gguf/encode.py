"""Quantized tensors as blocks of GGUF, code for code: the inverse of `block_types`.

A tensor is of a type if `gguf.quants.dequantize` of its blocks gives the same numbers, bit for bit. Its groups may be
larger than the blocks, each of which then gets a copy of the scale; zero points that are codes are subtracted from the
codes. Scales have to be numbers of fp16: rounding them here would move the numbers that codes were chosen for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....dtypes import QuantizedTensor
from ....primitives import CodebookSpec, ZeroPointDomain
from .block_types import TYPES, BlockType, Parts

BY_NAME = {kind.name: kind for kind in TYPES.values()}
NUMBERS = {kind.name: number for number, kind in TYPES.items()}


def _packed(codes: Tensor, bits: int, run: int) -> Tensor:
    """The inverse of `block_types._items`; codes have no higher bits than these."""
    parts = codes.unflatten(1, (-1, 8 // bits, run)).to(torch.uint8)
    packed = parts[:, :, 0]
    for index in range(1, 8 // bits):
        packed = packed | parts[:, :, index] << bits * index
    return packed.flatten(1)


def _halves(numbers: Tensor) -> Tensor:
    """The bytes (blocks, 2 n) of numbers (blocks, n) in fp16."""
    return numbers.to(torch.float16).contiguous().view(torch.uint8)


def _unsigned(codes: Tensor, zero: int) -> Tensor:
    return (codes.to(torch.int16) + zero).to(torch.uint8)


def _offset(parts: Parts, scale: bool = False) -> Tensor:
    found = parts.zero_point_scale if scale else parts.zero_point
    assert found is not None
    return found


def _q4(parts: Parts, zero: int = 0) -> tuple[Tensor, ...]:
    return (_packed(_unsigned(parts.codes, zero), 4, 16),)


def _q5(parts: Parts, zero: int = 0) -> tuple[Tensor, ...]:
    codes = _unsigned(parts.codes, zero)
    return _packed(codes >> 4, 1, 1), _packed(codes & 15, 4, 16)


def _q2_k(parts: Parts) -> tuple[Tensor, ...]:
    assert parts.scale_scale is not None
    scales = parts.scale | _offset(parts) << 4
    return scales, _packed(parts.codes, 2, 32), _halves(parts.scale_scale), _halves(-_offset(parts, True))


def _q3_k(parts: Parts) -> tuple[Tensor, ...]:
    assert parts.scale_scale is not None
    codes, scales = _unsigned(parts.codes, 4), _unsigned(parts.scale, 32)
    of_scales = _packed(scales & 15, 4, 8), _packed(scales >> 4, 2, 4)
    return _packed(codes >> 2, 1, 32), _packed(codes & 3, 2, 32), *of_scales, _halves(parts.scale_scale)


def _with_mins(parts: Parts) -> tuple[Tensor, ...]:
    assert parts.scale_scale is not None
    scale, least = parts.scale, _offset(parts)
    high = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scale, least)]
    field = torch.cat([*high, scale[:, 4:] & 15 | (least[:, 4:] & 15) << 4], 1)
    return _halves(parts.scale_scale), _halves(-_offset(parts, True)), field


def _q5_k(parts: Parts) -> tuple[Tensor, ...]:
    return *_with_mins(parts), _packed(parts.codes >> 4, 1, 32), _packed(parts.codes & 15, 4, 32)


def _q6_k(parts: Parts) -> tuple[Tensor, ...]:
    assert parts.scale_scale is not None
    codes = _unsigned(parts.codes, 32)
    scales = parts.scale.view(torch.uint8)
    return _packed(codes & 15, 4, 64), _packed(codes >> 4, 2, 32), scales, _halves(parts.scale_scale)


def _iq4_xs(parts: Parts) -> tuple[Tensor, ...]:
    assert parts.scale_scale is not None
    scales = _unsigned(parts.scale, 32)
    return _halves(parts.scale_scale), _packed(scales >> 4, 2, 1), _packed(scales & 15, 4, 1), *_q4(parts)


def _tq1_0(parts: Parts) -> tuple[Tensor, ...]:
    """As in `gguf.quants`: a byte is the least fraction of 256 that begins with these digits."""
    digits = _unsigned(parts.codes, 1).to(torch.int32)
    fields = []
    for run, (start, stop) in ((32, (0, 160)), (16, (160, 240)), (4, (240, 256))):
        rows = digits[:, start:stop].unflatten(1, (-1, run))
        powers = digits.new_tensor([81, 27, 9, 3, 1])[: rows.shape[1]].reshape(1, -1, 1)
        fields.append((((rows * powers).sum(1) * 256 + 242) // 243).to(torch.uint8))
    return *fields, _halves(parts.scale)


ENCODERS: dict[str, Callable[[Parts], tuple[Tensor, ...]]] = {
    "TQ1_0": _tq1_0,
    "TQ2_0": lambda parts: (_packed(_unsigned(parts.codes, 1), 2, 32), _halves(parts.scale)),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "MXFP4": lambda parts: (parts.scale.contiguous().view(torch.uint8), *_q4(parts)),
    "IQ4_XS": _iq4_xs,
    "Q4_0": lambda parts: (_halves(parts.scale), *_q4(parts, 8)),
    "IQ4_NL": lambda parts: (_halves(parts.scale), *_q4(parts)),
    "Q4_K": lambda parts: (*_with_mins(parts), _packed(parts.codes, 4, 32)),
    "Q4_1": lambda parts: (_halves(parts.scale), _halves(_offset(parts)), *_q4(parts)),
    "Q5_0": lambda parts: (_halves(parts.scale), *_q5(parts, 16)),
    "Q5_K": _q5_k,
    "Q5_1": lambda parts: (_halves(parts.scale), _halves(_offset(parts)), *_q5(parts)),
    "Q6_K": _q6_k,
    "Q8_0": lambda parts: (_halves(parts.scale), parts.codes.to(torch.int8).contiguous().view(torch.uint8)),
}
"""Fields of the bytes of blocks from their parts, codes without zero points; the smallest type first."""

SIGNED = {"TQ1_0": (-1, 1), "TQ2_0": (-1, 2), "Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
"""The codes of types of integers without an offset."""


def type_of(tensor: QuantizedTensor) -> tuple[str, Tensor]:
    """(type, blocks): the type that the tensor was read from, else the smallest that it is of; `encode`.

    Raises:
        ValueError: it is of none; the message says why it is not of the largest that has such codes.
    """
    spec = tensor.scheme.weight
    names = [name for name in ENCODERS if _numbers(BY_NAME[name].spec) == _numbers(spec)]
    if not names:
        raise ValueError(f"no type of GGUF has the numbers of {spec}")
    plain = tensor.canonical()
    for name in sorted(names, key=lambda name: BY_NAME[name].spec != spec):
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
    kind, spec, shape = BY_NAME[name], tensor.scheme.weight, tuple(tensor.shape)
    row = kind.row_bytes(shape)
    if _numbers(spec) != _numbers(kind.spec) or tuple(codes.shape) != shape:
        raise ValueError(f"{name} has other numbers than {spec}")
    if not codes.numel():
        return codes.new_empty(*shape[:-1], row, dtype=torch.uint8)
    parts = _parts(kind, codes, others) if spec.scale_spec else _with_scales(kind, spec, codes, others)
    return torch.cat(ENCODERS[name](parts), 1).reshape(*shape[:-1], row)


def _numbers(spec: Any) -> tuple[Any, ...]:
    """What two specs have in common if a type may hold the numbers of both: how reals follow from codes."""
    if spec.scale_spec is not None:
        domain = spec.zero_point_domain if spec.has_zero_point else None
        return spec.dtype, spec.granularity, getattr(spec, "table", domain), _numbers(spec.scale_spec)
    if isinstance(spec, CodebookSpec):
        return (spec.table,)
    kind = spec.dtype if spec.dtype.is_floating_point else "integers"
    integer = not spec.has_zero_point or spec.zero_point_domain is ZeroPointDomain.INT
    return kind, None if integer else spec.zero_point_domain, spec.rotation


def _parts(kind: BlockType, codes: Tensor, others: dict[str, Tensor]) -> Parts:
    """Parts of a type whose scales are codes."""
    blocks = codes.numel() // kind.size
    found = {name: others[name].reshape(blocks, -1) for name in Parts._fields if name in others}
    found |= {
        name: _halves_of(found[name], "scales of scales")
        for name in ("scale_scale", "zero_point_scale")
        if name in found
    }
    return Parts(codes.reshape(blocks, -1), **found)


def _with_scales(kind: BlockType, spec: Any, codes: Tensor, others: dict[str, Tensor]) -> Parts:
    """Parts of a type whose blocks have one scale, and one offset, in floating point."""
    group = spec.block_size(codes.shape)
    if group[-1] % kind.size:
        raise ValueError(f"its groups have {group[-1]} elements, blocks of {kind.name} {kind.size}")

    def of_blocks(name: str) -> Tensor:
        values = others[name]
        for axis, size in enumerate((*group[:-1], group[-1] // kind.size)):
            values = values.repeat_interleave(size, axis)
        return values.reshape(-1, 1)

    codes, offset = codes.reshape(-1, kind.size), None
    if "zero_point" in others and not spec.zero_point_domain.adds_zero_point:
        codes = codes.to(torch.int16) - of_blocks("zero_point").to(torch.int16)
    elif "zero_point" in others:
        offset = _halves_of(of_blocks("zero_point"), "offsets")
    low, high = SIGNED.get(kind.name, (0, 2**kind.spec.dtype.bits - 1))  # type: ignore[union-attr]
    if int(codes.min()) < low or int(codes.max()) > high:
        raise ValueError(f"its codes reach from {int(codes.min())} to {int(codes.max())}, those of {kind.name} {high}")
    scale = of_blocks("scale")
    if kind.name != "MXFP4":
        return Parts(codes, _halves_of(scale, "scales"), offset)
    if scale.dtype is not torch.float8_e8m0fnu or bool((scale.view(torch.uint8) == 255).any()):
        raise ValueError("its scales are no powers of two from 2^-127 to 2^127")
    return Parts(codes, scale)


def _halves_of(values: Tensor, what: str) -> Tensor:
    halves = values.to(torch.float16)
    if not torch.equal(halves.float(), values.float()):
        raise ValueError(f"its {what}, in {str(values.dtype).removeprefix('torch.')}, are not numbers of fp16")
    return halves
