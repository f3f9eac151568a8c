"""Integer codes in registers: out of the packed layout, and into floating point.

`primitives.packing.pack_bits` cuts a row of 8 G codes into 8 segments of G. A code has parts of 4, 2 and 1 bits, the binary
digits of its width; part p of segment j is in row j // (8/p) of the p rows of bytes of that part, at bit p (j % (8/p)).
So a tile of bytes gives tiles of codes of several segments: with 4 bits two, G apart along the contracted axis.
"""

import triton
import triton.language as tl


@triton.jit
def unpack_tile(pointers, mask, G, unit, s: tl.constexpr, BITS: tl.constexpr, MASKED: tl.constexpr):
    """Unsigned codes (uint8) of segment number unit * (8 / p) + s, p the width of the first part.

    `pointers` are those of row 0; the codes of 8 bits are one segment of one row.
    """
    if BITS == 8:
        codes = tl.load(pointers, mask=mask, other=0) if MASKED else tl.load(pointers)
    else:
        WIDTH: tl.constexpr = 4 if BITS >= 4 else 2 if BITS >= 2 else 1
        at = pointers + unit * G
        byte = tl.load(at, mask=mask, other=0) if MASKED else tl.load(at)
        codes = (byte >> (WIDTH * s)) & ((1 << WIDTH) - 1)
        segment = unit * (8 // WIDTH) + s
        if WIDTH == 4 and BITS & 2:
            codes |= _part(pointers, mask, G, segment, 4, 2, MASKED) << 4
        if WIDTH >= 2 and BITS & 1:
            codes |= _part(pointers, mask, G, segment, BITS - 1, 1, MASKED) << (BITS - 1)
    return codes


@triton.jit
def unpack_segment(pointers, mask, G, segment, BITS: tl.constexpr, MASKED: tl.constexpr):
    """`unpack_tile` of any one segment, a number known only when it runs, or a tensor that broadcasts to `pointers`."""
    if BITS == 8:
        codes = tl.load(pointers, mask=mask, other=0) if MASKED else tl.load(pointers)
    else:
        FIRST: tl.constexpr = 4 if BITS >= 4 else 2 if BITS >= 2 else 1
        codes = _part(pointers, mask, G, segment, 0, FIRST, MASKED)
        if FIRST == 4 and BITS & 2:
            codes |= _part(pointers, mask, G, segment, 4, 2, MASKED) << 4
        if FIRST >= 2 and BITS & 1:
            codes |= _part(pointers, mask, G, segment, BITS - 1, 1, MASKED) << (BITS - 1)
    return codes


@triton.jit
def _part(pointers, mask, G, segment, ROW: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """The part of WIDTH bits whose rows of bytes begin at ROW."""
    at = pointers + (ROW + segment // (8 // WIDTH)) * G
    byte = tl.load(at, mask=mask, other=0) if MASKED else tl.load(at)
    shift = (WIDTH * (segment % (8 // WIDTH))).to(tl.uint8)
    return (byte >> shift) & ((1 << WIDTH) - 1)


@triton.jit
def to_float(codes, zero, BITS: tl.constexpr, dtype: tl.constexpr):
    """codes - zero in `dtype`, exact; `zero` is of that dtype.

    Codes of less than 8 bits become the low bits of the significand of a power of two, without a conversion, of which a
    GPU makes 16 where it makes 128 additions.
    """
    if BITS == 8:
        w = codes.to(dtype) - zero
    elif dtype == tl.bfloat16:
        w = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128)
    elif dtype == tl.float16:
        w = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (zero + 1024)
    else:
        w = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608)
    return w
