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

from .launch import WeightArguments

# Two bytes -> the low nibbles as the low bits of 128 (bf16) or 1024 (fp16), two in a register.
_PAIR: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t; cvt.u32.u16 t, $1; SHIFT prmt.b32 t, t, 0, 0x4140; lop3.b32 $0, t, 0x000f000f, MAGIC, 0xea; }"
)
_LOW_BF16: tl.constexpr = tl.constexpr(_PAIR.value.replace("SHIFT", "").replace("MAGIC", "0x43004300"))
_LOW_FP16: tl.constexpr = tl.constexpr(_PAIR.value.replace("SHIFT", "").replace("MAGIC", "0x64006400"))
# The high nibbles.
_HIGH_BF16: tl.constexpr = tl.constexpr(_PAIR.value.replace("SHIFT", "shr.b32 t, t, 4;").replace("MAGIC", "0x43004300"))
_HIGH_FP16: tl.constexpr = tl.constexpr(_PAIR.value.replace("SHIFT", "shr.b32 t, t, 4;").replace("MAGIC", "0x64006400"))
# Two int8 -> two bf16, (128 + low 7 bits) - (128 or, if negative, 256); and two fp16, (1024 + v + 128) - 1152.
_INT8_BF16: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t, a, b, m; cvt.u32.u16 t, $1; prmt.b32 t, t, 0, 0x4140; mov.b32 m, 0xbf80bf80; "
    "lop3.b32 a, t, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, t, 0x00800080, 0x43004300, 0xea; "
    "fma.rn.bf16x2 $0, b, m, a; }"
)
_INT8_FP16: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t, m; cvt.u32.u16 t, $1; prmt.b32 t, t, 0, 0x4140; mov.b32 m, 0x64806480; "
    "lop3.b32 t, t, 0x00800080, 0x64006400, 0xbe; sub.f16x2 $0, t, m; }"
)
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
def unpack_floats(
    pointers, mask, G, unit, s: tl.constexpr, zero, ZERO: tl.constexpr, BITS: tl.constexpr, MASKED: tl.constexpr,
    ASM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """`to_float` of `unpack_tile`; without ZERO, int8 codes have a `zero` of 0."""
    if BITS == 4 and ASM and dtype != tl.float32:
        at = pointers + unit * G
        byte = tl.load(at, mask=mask, other=0) if MASKED else tl.load(at)
        if dtype == tl.bfloat16:
            if s == 0:
                w = tl.inline_asm_elementwise(_LOW_BF16, "=r,h", [byte], tl.bfloat16, True, 2)
            else:
                w = tl.inline_asm_elementwise(_HIGH_BF16, "=r,h", [byte], tl.bfloat16, True, 2)
            w = w - (zero + 128)
        else:
            if s == 0:
                w = tl.inline_asm_elementwise(_LOW_FP16, "=r,h", [byte], tl.float16, True, 2)
            else:
                w = tl.inline_asm_elementwise(_HIGH_FP16, "=r,h", [byte], tl.float16, True, 2)
            w = w - (zero + 1024)
    elif BITS == 8 and ASM and dtype != tl.float32 and pointers.dtype.element_ty == tl.int8:
        code = tl.load(pointers, mask=mask, other=0) if MASKED else tl.load(pointers)
        if dtype == tl.bfloat16:
            w = tl.inline_asm_elementwise(_INT8_BF16, "=r,h", [code], tl.bfloat16, True, 2)
        else:
            w = tl.inline_asm_elementwise(_INT8_FP16, "=r,h", [code], tl.float16, True, 2)
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


@triton.jit
def _dequantize(
    q_ptr, scale_ptr, zero_ptr, w_ptr, N, K, G, stride_qn, stride_sn, stride_sg, stride_zn, stride_zg,
    GROUP: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    UNITS: tl.constexpr = 1 if BITS == 8 else 4 if BITS >= 4 else 2 if BITS >= 2 else 1
    SEGMENTS: tl.constexpr = 1 if BITS == 8 else 8 // UNITS
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n % N
    inner = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    q_ptrs = q_ptr + n_in[:, None] * stride_qn + inner[None, :]
    in_segment = inner < G
    for unit in tl.static_range(UNITS):
        for s in tl.static_range(SEGMENTS):
            codes = unpack_tile(q_ptrs, in_segment[None, :], G, unit, s, BITS, True)
            k = (unit * SEGMENTS + s) * G + inner
            group = (tl.minimum(k, K - 1) // GROUP)[None, :]
            scale = tl.load(scale_ptr + n_in[:, None] * stride_sn + group * stride_sg).to(tl.float32)
            if ZERO:
                zero = tl.load(zero_ptr + n_in[:, None] * stride_zn + group * stride_zg).to(tl.float32)
            if ZERO == 1:
                w = to_float(codes, zero + OFFSET, BITS, tl.float32) * scale
            elif ZERO == 3:
                w = (to_float(codes, OFFSET, BITS, tl.float32) - zero) * scale
            elif ZERO == 2:
                w = to_float(codes, OFFSET + MIDDLE, BITS, tl.float32) * scale + zero
            else:
                w = to_float(codes, OFFSET, BITS, tl.float32) * scale
            mask = (n[:, None] < N) & (in_segment & (k < K))[None, :]
            tl.store(w_ptr + n[:, None] * K + k[None, :], w.to(w_ptr.dtype.element_ty), mask=mask)


def dequantize(weight: WeightArguments, dtype: torch.dtype) -> Tensor:
    """The weight (N, K) in floating point."""
    w = weight.qdata.new_empty(weight.n, weight.k, dtype=dtype)
    _dequantize[(triton.cdiv(weight.n, 8), triton.cdiv(weight.segment, 256))](
        *weight.pointers, w, weight.n, *weight.sizes, *weight.steps, **weight.numerics, BLOCK_N=8, BLOCK_K=256,
        num_warps=4,
    )  # fmt: skip
    return w
