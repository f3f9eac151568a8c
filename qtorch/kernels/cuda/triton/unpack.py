"""Integer codes in registers: unpacking, and conversion to floating point.

`layouts.packed.pack_bits` cuts a row of 8 G codes into 8 segments of G. A code has parts of 4, 2 and 1 bits, the
binary digits of its width; part p of segment j is in row j // (8/p) of the p rows of bytes of that part, at bit
p (j % (8/p)). So a tile of bytes gives tiles of codes of several segments: with 4 bits two, G apart along K.

LLVM unpacks the bytes of a register one at a time. On a GPU, inline assembly (ASM) converts all of them together, for
codes of 4 and 8 bits; the interpreter has no assembler, and computes the same numbers by portable code.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import WeightArguments, power_of_two_in


@triton.constexpr_function
def _to_floats(code: str, dtype: tl.dtype, pack: int) -> str:
    """Assembly that makes `pack` floats, two in a register, of as many bytes in one.

    "low", "high": the nibbles become the low bits of 128 (bf16) or 1024 (fp16), which is still to be subtracted.
    "int8": in bf16 (128 + low 7 bits) - (128 or, if negative, 256), in fp16 (1024 + code + 128) - 1152.
    """
    magic = "0x43004300" if dtype == tl.bfloat16 else "0x64006400"
    lines = [".reg .b32 t, a, b, m;", "mov.b32 t, $2;" if pack == 4 else "cvt.u32.u16 t, $1;"]
    if code == "high":
        lines.append("shr.b32 t, t, 4;")
    elif code == "int8":
        lines.append("mov.b32 m, 0xbf80bf80;" if dtype == tl.bfloat16 else "mov.b32 m, 0x64806480;")
    for pair in range(pack // 2):
        lines.append(f"prmt.b32 a, t, 0, {('0x4140', '0x4342')[pair]};")
        if code != "int8":
            lines.append(f"lop3.b32 ${pair}, a, 0x000f000f, {magic}, 0xea;")
        elif dtype == tl.bfloat16:
            lines.append(f"lop3.b32 b, a, 0x00800080, {magic}, 0xea; lop3.b32 a, a, 0x007f007f, {magic}, 0xea;")
            lines.append(f"fma.rn.bf16x2 ${pair}, b, m, a;")
        else:
            lines.append(f"lop3.b32 a, a, 0x00800080, {magic}, 0xbe; sub.f16x2 ${pair}, a, m;")
    return f"{{ {' '.join(lines)} }}"


# Four bytes and a shift of 0 or 4 -> four codes in four bytes; those of signed types less 8.
_NIBBLES: tl.constexpr = tl.constexpr("shr.b32 $0, $1, $2; and.b32 $0, $0, 0x0f0f0f0f;")
_SIGNED_NIBBLES: tl.constexpr = tl.constexpr(
    _NIBBLES.value + " or.b32 $0, $0, 0x80808080; sub.u32 $0, $0, 0x08080808; xor.b32 $0, $0, 0x80808080;"
)


@triton.jit
def unpack_tile(pointers, mask, G, unit, s: tl.constexpr, BITS: tl.constexpr, MASKED: tl.constexpr):
    """Unsigned codes (uint8) of segment number unit * (8 / p) + s, p the width of the first part. `pointers` are those
    of row 0; the codes of 8 bits are one segment of one row."""
    if BITS == 8:
        codes = tl.load(pointers, mask=mask, other=0) if MASKED else tl.load(pointers)
    else:
        WIDTH: tl.constexpr = 4 if BITS >= 4 else 2 if BITS >= 2 else 1
        at = pointers + unit * G
        byte = tl.load(at, mask=mask, other=0) if MASKED else tl.load(at)
        codes = (byte >> (WIDTH * s)) & ((1 << WIDTH) - 1)
        # In a variable it becomes a number of the kernel, also where `unit` is known when it is compiled.
        segment = unit * (8 // WIDTH) + s
        codes = _with_rest(codes, pointers, mask, G, segment, WIDTH, BITS, MASKED)
    return codes


@triton.jit
def unpack_segment(pointers, mask, G, segment, BITS: tl.constexpr, MASKED: tl.constexpr):
    """`unpack_tile` of any one segment, a number known only when it runs, or a tensor that broadcasts to `pointers`."""
    if BITS == 8:
        codes = tl.load(pointers, mask=mask, other=0) if MASKED else tl.load(pointers)
    else:
        WIDTH: tl.constexpr = 4 if BITS >= 4 else 2 if BITS >= 2 else 1
        codes = _part(pointers, mask, G, segment, 0, WIDTH, MASKED)
        codes = _with_rest(codes, pointers, mask, G, segment, WIDTH, BITS, MASKED)
    return codes


@triton.jit
def _with_rest(codes, pointers, mask, G, segment, WIDTH: tl.constexpr, BITS: tl.constexpr, MASKED: tl.constexpr):
    """Codes whose first parts of WIDTH bits are `codes`."""
    if WIDTH == 4 and BITS & 2:
        codes |= _part(pointers, mask, G, segment, 4, 2, MASKED) << 4
    if WIDTH >= 2 and BITS & 1:
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
def _converted(byte, code: tl.constexpr, PACK: tl.constexpr, dtype: tl.constexpr):
    registers: tl.constexpr = "=r,=r,r" if PACK == 4 else "=r,h"
    # The type has to be written out.
    if dtype == tl.bfloat16:
        w = tl.inline_asm_elementwise(_to_floats(code, dtype, PACK), registers, [byte], tl.bfloat16, True, PACK)
    else:
        w = tl.inline_asm_elementwise(_to_floats(code, dtype, PACK), registers, [byte], tl.float16, True, PACK)
    return w


@triton.jit
def unpack_floats(
    pointers, mask, G, unit, s: tl.constexpr, zero, ZERO: tl.constexpr, BITS: tl.constexpr, MASKED: tl.constexpr,
    ASM: tl.constexpr, PACK: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """`to_float` of `unpack_tile`; without ZERO, int8 codes have a `zero` of 0. PACK codes, 2 or 4, are converted
    together: as many as the layout of the product has side by side."""
    if BITS == 4 and ASM and dtype != tl.float32:
        at = pointers + unit * G
        byte = tl.load(at, mask=mask, other=0) if MASKED else tl.load(at)
        w = _converted(byte, "low" if s == 0 else "high", PACK, dtype)
        w = w - (zero + (128 if dtype == tl.bfloat16 else 1024))
    elif BITS == 8 and ASM and dtype != tl.float32 and pointers.dtype.element_ty == tl.int8:
        byte = tl.load(pointers, mask=mask, other=0) if MASKED else tl.load(pointers)
        w = _converted(byte, "int8", PACK, dtype)
        if ZERO:
            w = w - zero
    else:
        w = to_float(unpack_tile(pointers, mask, G, unit, s, BITS, MASKED), zero, BITS, dtype)
    return w


@triton.jit
def unpack_int8(
    pointers, mask, G, segment, BITS: tl.constexpr, OFFSET: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Codes less OFFSET as int8, of any one segment; unsigned codes of 8 bits, OFFSET 128, as they are less 128."""
    if BITS == 4 and ASM and not MASKED:
        byte = tl.load(pointers + segment // 2 * G)
        shift = byte.to(tl.int32) * 0 + segment % 2 * 4
        if OFFSET:
            w = tl.inline_asm_elementwise(_SIGNED_NIBBLES, "=r,r,r,r,r,r", [byte, shift], tl.int8, True, 4)
        else:
            w = tl.inline_asm_elementwise(_NIBBLES, "=r,r,r,r,r,r", [byte, shift], tl.int8, True, 4)
    else:
        codes = unpack_segment(pointers, mask, G, segment, BITS, MASKED)
        if OFFSET == 128:
            w = (codes ^ 128).to(tl.int8, bitcast=True)
        else:
            w = codes.to(tl.int8) - OFFSET
    return w


@triton.jit
def to_float(codes, zero, BITS: tl.constexpr, dtype: tl.constexpr):
    """codes - zero in `dtype`, exact; `zero` is of that dtype. Codes of less than 8 bits become the low bits of the
    significand of a power of two, without a conversion, of which a GPU makes 16 where it makes 128 additions."""
    if BITS == 8:
        w = codes.to(dtype) - zero
    elif dtype == tl.bfloat16:
        w = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128)
    elif dtype == tl.float16:
        w = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (zero + 1024)
    else:
        w = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608)
    return w


RUN = 16
"""Codes that a thread of `_dequantize` scales together, where groups allow it."""


@triton.jit
def _dequantize(
    q_ptr, scale_ptr, zero_ptr, w_ptr, N, K, G, stride_qn, stride_sn, stride_sg, stride_zn, stride_zg,
    GROUP: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr,
    RUN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Axes (row, run, code of the run). A run lies in one group.
    UNITS: tl.constexpr = 1 if BITS == 8 else 4 if BITS >= 4 else 2 if BITS >= 2 else 1
    SEGMENTS: tl.constexpr = 1 if BITS == 8 else 8 // UNITS
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None, None]
    n_in = n % N
    runs = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K // RUN)[None, :, None] * RUN
    inner = runs + tl.arange(0, RUN)[None, None, :]
    q_ptrs = q_ptr + n_in * stride_qn + inner
    in_segment = inner < G
    for unit in tl.static_range(UNITS):
        for s in tl.static_range(SEGMENTS):
            codes = unpack_tile(q_ptrs, in_segment, G, unit, s, BITS, True)
            k = (unit * SEGMENTS + s) * G
            group = tl.minimum(k + runs, K - 1) // GROUP
            scale = tl.load(scale_ptr + n_in * stride_sn + group * stride_sg).to(tl.float32)
            if ZERO > 0:
                zero = tl.load(zero_ptr + n_in * stride_zn + group * stride_zg).to(tl.float32)
            if ZERO == -1:
                w = tl.load(zero_ptr + codes.to(tl.int32)).to(tl.float32) * scale
            elif ZERO == -2:
                numbers = zero_ptr + n_in * stride_zn + group * stride_zg
                w = tl.load(numbers + codes.to(tl.int32)).to(tl.float32) * scale
            elif ZERO == 1:
                w = to_float(codes, zero + OFFSET, BITS, tl.float32) * scale
            elif ZERO == 3:
                w = (to_float(codes, OFFSET, BITS, tl.float32) - zero) * scale
            elif ZERO == 2:
                w = to_float(codes, OFFSET + MIDDLE, BITS, tl.float32) * scale + zero
            else:
                w = to_float(codes, OFFSET, BITS, tl.float32) * scale
            mask = (n < N) & in_segment & (k + inner < K)
            tl.store(w_ptr + n * K + k + inner, w.to(w_ptr.dtype.element_ty), mask=mask)


def dequantize(weight: WeightArguments, dtype: torch.dtype) -> Tensor:
    """The weight (N, K) in floating point."""
    w = weight.qdata.new_empty(weight.n, weight.k, dtype=dtype)
    run = power_of_two_in(RUN, weight.segment, 0 if weight.groups == 1 else weight.group)
    _dequantize[(triton.cdiv(weight.n, 8), triton.cdiv(weight.segment, 256))](
        *weight.pointers, w, weight.n, *weight.sizes, *weight.steps, **weight.numerics, RUN=run, BLOCK_N=8, BLOCK_K=256,
        num_warps=4,
    )  # fmt: skip
    return w
