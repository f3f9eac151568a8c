"""A step of Adam with moments in codes: one program for a few blocks, which reads and writes everything once.

Equations, order of operations and random bits are those of `kernels.ops.adam`, to the bit. A tile has a row for each
block; its columns are the 8 runs in which codes of 4 bits are packed (`layouts.packed`), each completed to a power of
two, so that two codes of a byte lie in the same place of neighbouring runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.granularity import FlatBlocks
from ...custom_ops import note
from ...ops.adam import AdamStep, Moment
from .launch import check_device
from .quantize import TINY, magnitude_bits

FORM_NUMBERS = {"32": 0, "8": 1, "4": 2, "float8": 3}

ELEMENTS = 1024
"""Of a program."""

_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _value(code, STEPS: tl.constexpr, CENTER: tl.constexpr, FORM: tl.constexpr):
    """The number of a code, int32, before it is scaled."""
    if FORM == 3:
        size = code & 0x7F
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
        value = tl.where(size == 0x7F, float("nan"), value)
        return tl.where(code >= 128, -value, value)
    k = code - CENTER
    u = k.to(tl.float32) * (1.0 / STEPS)
    value = u * u
    if FORM == 1:
        value = value * value
    return tl.where(k < 0, -value, value)


@triton.jit
def _code(x, STEPS: tl.constexpr, CENTER: tl.constexpr, FORM: tl.constexpr):
    """The code, int32, of the number nearest to x, which is within the range of codes."""
    if FORM == 3:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        small = ((size.to(tl.float32, bitcast=True) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
        return tl.where(size < 0x3C800000, small, normal) | tl.where(bits < 0, 0x80, 0)
    size = tl.abs(x) * (STEPS * STEPS * STEPS * STEPS * 1.0 if FORM == 1 else STEPS * STEPS * 1.0)
    root = tl.sqrt(size)
    if FORM == 1:
        root = tl.sqrt(root)
    k = tl.where(root > STEPS - 1, STEPS - 1.0, root).to(tl.int32)
    # The root may be a little wrong; the number nearest to x is that of k or of k + 1 nevertheless.
    half = k.to(tl.float32) + 0.5
    square = half * half
    middle = (square + 1.5) * square + 0.0625 if FORM == 1 else square + 0.25
    k += (size > middle).to(tl.int32)
    return tl.where(x < 0, -k, k) + CENTER


@triton.jit
def _offsets(blocks, run, place, BLOCK, RUN, FORM: tl.constexpr):
    """Places of the codes in bytes."""
    if FORM == 2:
        return blocks[:, None] * (4 * RUN) + ((run // 2) * RUN + place)[None, :]
    return blocks[:, None] * BLOCK + (run * RUN + place)[None, :]


@triton.jit
def _read(c_ptr, s_ptr, blocks, run, place, inside, COUNT, BLOCK, RUN, STEPS: tl.constexpr, CENTER: tl.constexpr,
          FORM: tl.constexpr):  # fmt: skip
    """A moment of a tile, 0 outside of the blocks."""
    code = tl.load(c_ptr + _offsets(blocks, run, place, BLOCK, RUN, FORM), mask=inside, other=0).to(tl.int32)
    if FORM == 2:
        code = (code >> ((run % 2) * 4)[None, :]) & 15
    scale = tl.load(s_ptr + blocks, mask=blocks < COUNT, other=0.0)[:, None]
    return tl.where(inside, _value(code, STEPS, CENTER, FORM) * scale, 0.0)


@triton.jit
def _write(x, c_ptr, s_ptr, blocks, run, place, inside, COUNT, BLOCK, RUN, largest, STEPS: tl.constexpr,
           CENTER: tl.constexpr, ROOT: tl.constexpr, TINY: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr,
           WIDTH: tl.constexpr):  # fmt: skip
    """Quantizes the moment x of a tile."""
    bits = tl.max(magnitude_bits(x), 1)
    most = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(most, 448.0) if FORM == 3 else most
    scale = tl.where(scale < TINY, TINY, tl.where(scale > largest, largest, scale))
    scale = tl.where(bits >= _INFINITE, float("nan"), scale)
    tl.store(s_ptr + blocks, scale, mask=blocks < COUNT)
    v = x * tl.div_rn(1.0, scale)[:, None]
    if FORM == 3:
        v = tl.where(v > 448.0, 448.0, tl.where(v < -448.0, -448.0, v))
    code = _code(v, STEPS, CENTER, FORM)
    if ROOT:
        code = tl.where((x > 0) & (code < 1), 1, code)
    code = tl.where(inside, code, 0)
    if FORM == 2:
        pairs = tl.reshape(code, (ROWS, 4, 2, WIDTH))
        byte = tl.sum(pairs * (1 + 15 * tl.arange(0, 2))[None, None, :, None], 2)
        pair, column = tl.arange(0, 4)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
        at = c_ptr + blocks[:, None, None] * (4 * RUN) + pair * RUN + column
        tl.store(at, byte.to(tl.uint8), mask=(column < RUN) & (blocks[:, None, None] < COUNT) & (pair < 4))
    else:
        tl.store(c_ptr + _offsets(blocks, run, place, BLOCK, RUN, FORM), code.to(tl.uint8), mask=inside)


@triton.jit
def _rounded_up_at_random(w, number, key):
    x = number.to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    noise = ((x ^ (x >> 16)) >> 16).to(tl.int32)
    bits = w.to(tl.int32, bitcast=True)
    up = (bits + noise) & -65536
    return tl.where((bits & _INFINITE) != _INFINITE, up, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["key", "first"])
def _step(
    w_ptr, g_ptr, c1_ptr, s1_ptr, c2_ptr, s2_ptr, c3_ptr, s3_ptr, beta1, beta2, rest1, rest2, eps, decay, l2, step_size,
    correction, largest, key, first, COUNT, LENGTH, OF_ROW, BLOCK, RUN, TINY: tl.constexpr, FORM: tl.constexpr,
    AMSGRAD: tl.constexpr, L2: tl.constexpr, RANDOM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    N1: tl.constexpr = 127 if FORM == 1 else 7
    N2: tl.constexpr = 255 if FORM == 1 else 15
    C1: tl.constexpr = 128 if FORM == 1 else 8
    blocks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 8 * WIDTH)
    run, place = column // WIDTH, column % WIDTH
    element = run * RUN + place
    inside = (blocks < COUNT)[:, None] & ((place < RUN) & (element < BLOCK))[None, :]
    start = (blocks % OF_ROW) * BLOCK
    here = inside & (start[:, None] + element[None, :] < LENGTH)
    at = ((blocks // OF_ROW) * LENGTH + start)[:, None] + element[None, :]

    w = tl.load(w_ptr + at, mask=here, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=here, other=0.0).to(tl.float32)
    if FORM == 0:
        m = tl.load(c1_ptr + at, mask=here, other=0.0)
        v = tl.load(c2_ptr + at, mask=here, other=0.0)
    else:
        m = _read(c1_ptr, s1_ptr, blocks, run, place, inside, COUNT, BLOCK, RUN, N1, C1, FORM)
        s = _read(c2_ptr, s2_ptr, blocks, run, place, inside, COUNT, BLOCK, RUN, N2, 0, FORM)
        v = s * s
    if L2:
        g = g + w * l2
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    if FORM == 0:
        tl.store(c1_ptr + at, m, mask=here)
        tl.store(c2_ptr + at, v, mask=here)
        if AMSGRAD:
            highest = tl.load(c3_ptr + at, mask=here, other=0.0)
            v = tl.where(highest > v, highest, v)
            tl.store(c3_ptr + at, v, mask=here)
        s = tl.sqrt_rn(v)
    else:
        most = 3.4028234663852886e38
        s = tl.sqrt_rn(tl.where((v > most) & (tl.abs(g) <= most), most, v))
        _write(m, c1_ptr, s1_ptr, blocks, run, place, inside, COUNT, BLOCK, RUN, largest, N1, C1, False, TINY, FORM,
               ROWS, WIDTH)  # fmt: skip
        _write(s, c2_ptr, s2_ptr, blocks, run, place, inside, COUNT, BLOCK, RUN, largest, N2, 0, True, TINY, FORM,
               ROWS, WIDTH)  # fmt: skip
        if AMSGRAD:
            highest = _read(c3_ptr, s3_ptr, blocks, run, place, inside, COUNT, BLOCK, RUN, N2, 0, FORM)
            s = tl.where(highest > s, highest, s)
            _write(s, c3_ptr, s3_ptr, blocks, run, place, inside, COUNT, BLOCK, RUN, largest, N2, 0, True, TINY, FORM,
                   ROWS, WIDTH)  # fmt: skip
    w = w * decay - tl.div_rn(m, s * correction + eps) * step_size
    if RANDOM:
        w = _rounded_up_at_random(w, at + first, key)
    tl.store(w_ptr + at, w.to(w_ptr.dtype.element_ty), mask=here)


def adam(
    weight: Tensor, grad: Tensor, moments: list[Moment], blocks: FlatBlocks, step: AdamStep, largest: float
) -> None:
    """See `kernels.ops.adam.adam_step`; the arguments are checked already (`check_step`).

    Args:
        largest: scale that codes may have.
    """
    check_device("adam_step", weight=weight, grad=grad, **{f"moment {i}": m.data for i, m in enumerate(moments)})
    note("triton.adam_step")
    if step.form == "32":
        blocks = FlatBlocks(1, weight.numel(), 256)
    run = -(-blocks.block // 8)
    width = triton.next_power_of_2(run)
    rows = max(1, ELEMENTS // (8 * width))
    pointers = []
    for moment in (*moments, moments[0])[:3]:
        data = moment.data.view(torch.uint8) if step.form != "32" else moment.data
        pointers += [data, data if moment.scale is None else moment.scale]
    count = blocks.shape[0]
    random = step.key is not None and weight.dtype == torch.bfloat16
    _step[(triton.cdiv(count, rows),)](
        weight, grad, *pointers, step.beta1, step.beta2, 1 - step.beta1, 1 - step.beta2, step.eps, step.decay, step.l2,
        step.step_size, step.correction, largest, _signed(step.key or 0), _signed(step.first), count, blocks.length,
        blocks.of_row, blocks.block, run, TINY, FORM_NUMBERS[step.form], len(moments) > 2, step.l2 != 0, random, rows,
        width, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _signed(value: int) -> int:
    """The lowest 32 bits as a signed number, so that the argument has one type."""
    return (value + 2**31) % 2**32 - 2**31
