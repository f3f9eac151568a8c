"""PackedLayout: codes of less than 8 bits, packed to their true size along one axis.

`pack_bits` packs codes of 1 to 8 bits along any axis. The axis is padded to 8 G codes; the code at j G + g is item j of
group g, so each group has 8 codes and becomes `bits` bytes. A code is split into parts of 4, 2 and 1 bits, the binary
digits of its width, the low part first; a part of p bits fills p bytes of the group:

    packed[i G + g] = sum_s part[(i 8/p + s) G + g] << (p s),    0 <= i < p,  0 <= s < 8/p

and the parts follow one after the other. Items that share a byte are G apart in memory, and no part straddles two
bytes, so packing and unpacking are shifts and masks of contiguous runs, which vectorize.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..qdtype import QDType
from ..slices import in_slices
from ..spec import QuantSpec, Scheme
from .base import Form, Layout, register_layout


@dataclass(frozen=True, repr=False)
class LayoutAlongAxis(Layout):
    """Base of the layouts that pack the codes along one axis.

    Args:
        axis: counted from the end. Transposed views have another than the last.

    Raises:
        ValueError: `axis` is not negative.
    """

    axis: int = -1

    def __post_init__(self) -> None:
        if self.axis >= 0:
            raise ValueError(f"{self!r}: axis is counted from the end and must be negative, got {self.axis}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.axis == -1 else f'axis={self.axis}'})"

    def check(self, scheme: Scheme) -> None:
        super().check(scheme)
        if len(scheme.shape) < -self.axis:
            raise ValueError(f"{self!r}: a tensor of shape {scheme.shape} has no axis {self.axis}")

    @property
    def packed_axis(self) -> int:
        return self.axis

    def with_packed_axis(self, axis: int) -> Layout:
        return replace(self, axis=axis)


@register_layout
@dataclass(frozen=True, repr=False)
class PackedLayout(LayoutAlongAxis):
    """Codes packed in uint8 at their true size along `axis` (see `pack_bits`), signed ones offset; scale and zero point
    separate."""

    name = "packed"

    def check_spec(self, weight: QuantSpec) -> None:
        if not can_pack_bits(weight.dtype):
            raise ValueError(f"PackedLayout packs codes of 1 to 7 bits, the weight has {weight.dtype}")

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        shape = list(scheme.codes_shape)
        shape[self.axis] = packed_length(shape[self.axis], scheme.weight.dtype.bits)
        return (Form(tuple(shape), {torch.uint8}),)

    def pack_qdata(self, codes: Tensor, scheme: Scheme) -> Tensor:
        return pack_codes(codes, scheme.weight.dtype, self.axis)

    def unpack_qdata(self, qdata: Tensor, scheme: Scheme) -> Tensor:
        return unpack_codes(qdata, scheme.weight.dtype, scheme.shape[self.axis], self.axis)


_GROUP = 8


def packed_length(length: int, bits: int) -> int:
    """Number of bytes into which `pack_bits` packs `length` codes."""
    return -(-length // _GROUP) * bits


def pack_bits(codes: Tensor, bits: int, axis: int = -1) -> Tensor:
    """Pack unsigned codes of `bits` bits, in any integer dtype, along `axis` into uint8; format at the top of the
    file."""
    _check_bits(bits)
    if bits == _GROUP:
        return codes.to(torch.uint8)
    axis %= codes.dim()
    return in_slices(lambda part: _pack(part, bits, axis), codes, axes=axis)


def _pack(codes: Tensor, bits: int, axis: int) -> Tensor:
    length = codes.shape[axis]
    groups = -(-length // _GROUP)
    x = codes.to(torch.uint8)
    if length % _GROUP:
        padding = [0, 0] * (x.dim() - 1 - axis) + [0, groups * _GROUP - length]
        x = torch.nn.functional.pad(x, padding)
    x = x.unflatten(axis, (_GROUP, groups))
    packed = []
    for low, part in _parts(bits):
        items = (x >> low).unflatten(axis, (part, _GROUP // part))
        byte = items.select(axis + 1, 0) & (2**part - 1)
        for s in range(1, _GROUP // part):
            byte = byte | ((items.select(axis + 1, s) & (2**part - 1)) << (part * s))
        packed.append(byte)
    return (packed[0] if len(packed) == 1 else torch.cat(packed, axis)).flatten(axis, axis + 1)


def unpack_bits(packed: Tensor, bits: int, length: int, axis: int = -1, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Inverse of `pack_bits`: the first `length` codes along `axis`; `ValueError` if `packed` has another size."""
    _check_bits(bits)
    axis %= packed.dim()
    if bits == _GROUP:
        return packed.to(dtype)
    groups = -(-length // _GROUP)
    if packed.shape[axis] != groups * bits:
        found = f"axis {axis} of {tuple(packed.shape)} has {packed.shape[axis]}"
        raise ValueError(f"{length} codes of {bits} bits take {groups * bits} bytes, {found}")
    return in_slices(lambda part: _unpack(part, bits, length, axis).to(dtype), packed, axes=axis)


def _unpack(packed: Tensor, bits: int, length: int, axis: int) -> Tensor:
    parts = packed.unflatten(axis, (bits, -1))
    codes, first = None, 0
    for low, part in _parts(bits):
        byte = parts.narrow(axis, first, part)
        first += part
        mask = 2**part - 1
        items = [(byte >> (part * s)) & mask for s in range(_GROUP // part - 1)]
        # The topmost item needs no mask.
        items.append(byte >> (_GROUP - part))
        value = torch.stack(items, axis + 1).flatten(axis, axis + 2)
        codes = value if codes is None else codes | (value << low)
    assert codes is not None
    return codes.narrow(axis, 0, length)


def can_pack_bits(dtype: QDType) -> bool:
    """Whether `pack_codes` makes codes of this type smaller: they have less than 8 bits and are stored in a byte."""
    return dtype.bits < _GROUP and dtype.storage in (torch.int8, torch.uint8)


def pack_codes(codes: Tensor, dtype: QDType, axis: int = -1) -> Tensor:
    """`pack_bits` of codes of `dtype` in their storage dtype; signed ones are offset by 2^(bits-1)."""
    unsigned = codes.view(torch.uint8)
    return pack_bits(unsigned + 2 ** (dtype.bits - 1) if _has_offset(dtype) else unsigned, dtype.bits, axis)


def unpack_codes(packed: Tensor, dtype: QDType, length: int, axis: int = -1) -> Tensor:
    """Inverse of `pack_codes`."""
    codes = unpack_bits(packed, dtype.bits, length, axis)
    return (codes - 2 ** (dtype.bits - 1)).view(torch.int8) if _has_offset(dtype) else codes


def pack_dense(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., C), uint8, in dense rows (..., ceil(C * bits / 32)) of int32, see `unpack_dense`; zero bits fill the
    last word."""
    words = -(-codes.shape[-1] * bits // 32)
    groups = -(-4 * words // bits)  # of 8 codes, in `bits` bytes
    padded = torch.nn.functional.pad(codes, (0, groups * _GROUP - codes.shape[-1]))
    if 8 % bits == 0:
        # Two codes of `width` bits, in the halves of an integer, become one of 2 * width in its lower half.
        data, width = padded.flatten(), bits
        while width < 8:
            pairs = data.view(torch.int16)
            data = (pairs | (pairs >> (8 - width))).to(torch.uint8)
            width *= 2
    else:
        spread, packed = padded.unflatten(-1, (groups, _GROUP)), list[Tensor]()
        for j in range(_GROUP):
            byte, shift = divmod(j * bits, 8)
            code = spread[..., j]
            if shift == 0:
                packed.append(code.clone())
            else:
                packed[byte] |= code << shift
            if shift + bits > 8:
                packed.append(code >> (8 - shift))
        data = torch.stack(packed, -1)
    data = data.reshape(*codes.shape[:-1], groups * bits)[..., : 4 * words]
    return data.flatten().view(torch.int32).reshape(*codes.shape[:-1], words)


def unpack_dense(words: Tensor, bits: int, length: int) -> Tensor:
    """Codes (..., length) in uint8 of dense rows (..., W) of int32 or uint8: code j is in bits j b to j b + b - 1 of
    its row, the lowest first, and may straddle words."""
    data = words.contiguous().view(torch.uint8)
    if data.shape[-1] * 8 < length * bits:
        raise ValueError(f"{length} codes of {bits} bits take {length * bits} bits, a row has {data.shape[-1] * 8}")
    if 8 % bits == 0:
        codes = [(data >> low) & (2**bits - 1) for low in range(0, 8, bits)]
        return (torch.stack(codes, -1).flatten(-2) if bits < 8 else data)[..., :length]
    groups = -(-length // _GROUP)
    missing = groups * bits - data.shape[-1]
    if missing > 0:
        data = torch.nn.functional.pad(data, (0, missing))
    parts = data[..., : groups * bits].unflatten(-1, (groups, bits))
    codes = []
    for j in range(_GROUP):
        byte, shift = divmod(j * bits, 8)
        code = parts[..., byte] >> shift
        if shift + bits > 8:
            code = code | (parts[..., byte + 1] << (8 - shift))
        codes.append(code & (2**bits - 1))
    return torch.stack(codes, -1).flatten(-2)[..., :length]


class RowsInSlices:
    """Reads the codes of a matrix that `pack_codes` packed along its last axis, a slice of rows at a time, into memory
    that it keeps: new memory for each slice would not be in cache. A slice is valid until the next one is read."""

    def __init__(self, packed: Tensor, dtype: QDType, length: int) -> None:
        self.packed, self.dtype, self.length = packed, dtype, length
        self.groups = packed.shape[1] // dtype.bits
        self.memory = packed.new_empty(0, _GROUP, self.groups)

    def __call__(self, start: int, stop: int) -> Tensor:
        """`unpack_codes` of the rows from `start` to `stop`."""
        bits = self.dtype.bits
        parts = self.packed[start:stop].unflatten(1, (bits, self.groups))
        if len(self.memory) < len(parts):
            self.memory = parts.new_empty(len(parts), _GROUP, self.groups)
        codes, first = self.memory[: len(parts)], 0
        for low, part in _parts(bits):
            byte = parts.narrow(1, first, part)
            first += part
            items = codes.unflatten(1, (part, _GROUP // part))
            for s in range(_GROUP // part):
                _move_bits(byte, part * s, 2**part - 1, low, items.select(2, s))
        if _has_offset(self.dtype):
            codes = codes.sub_(2 ** (bits - 1)).view(torch.int8)
        return codes.flatten(1)[:, : self.length]


def _move_bits(byte: Tensor, shift: int, mask: int, to: int, code: Tensor) -> None:
    """Write the bits of `mask` at `shift` of `byte` into `code` at `to`; at 0, over what is in `code`."""
    if to:
        code |= ((byte >> shift) & mask) << to
    elif shift:
        torch.bitwise_right_shift(byte, shift, out=code)
        if mask << shift <= 127:  # there are bits above
            code &= mask
    else:
        torch.bitwise_and(byte, mask, out=code)


def _has_offset(dtype: QDType) -> bool:
    return dtype.storage is torch.int8


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= _GROUP:
        raise ValueError(f"pack_bits takes codes of 1 to 8 bits, got {bits}")


def _parts(bits: int) -> list[tuple[int, int]]:
    """(lowest bit, width) of the parts of a code: widths of 4, 2 and 1."""
    parts, low = [], 0
    for part in (4, 2, 1):
        if bits & part:
            parts.append((low, part))
            low += part
    return parts
