"""A step of Adam on one parameter whose moments are held in codes, in place.

    g <- g + l2 w                                       Adam's weight decay; AdamW: l2 = 0
    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2,    s = sqrt(v)      with amsgrad, s <- the largest s so far
    w <- decay w - step_size m / (correction s + eps)

    decay = 1 - lr weight_decay (Adam: 1),  step_size = lr / (1 - beta1^t),  correction = 1 / sqrt(1 - beta2^t)

in fp32, in this order, each operation rounded on its own, so that compiled kernels give the same bits. Where squares
of finite g overflow, v is the largest number: an infinite scale would lose the whole block. The weight is rounded
once, so weight decay adds to the update before anything of it is lost. After the update, which uses m and s as
computed, they are quantized by blocks; codes of s stand for s, not for v, and are at least 1 where s > 0 (a code of 0
would divide m by eps alone).

With `key` a bf16 weight is rounded stochastically: its bits plus 16 random ones, truncated. The random bits are a
function of the key and of the element's number, so that a resumed run repeats them, replicas agree, and shards get
those of the whole.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives import CodebookSpec, PerRow, QuantSpec, ZeroPointDomain, codebooks, qdtype
from ...primitives.granularity import FlatBlocks
from ...primitives.layouts import can_pack_bits, pack_codes, packed_length, unpack_codes
from .. import custom_ops, registry

_FLOAT8 = QuantSpec(qdtype("float8_e4m3fn"), PerRow(), zero_point_domain=ZeroPointDomain.NONE)


class MomentForm(NamedTuple):
    """How the two moments are held: specs of their blocks, as rows of a matrix; `second` quantizes s."""

    name: str
    first: CodebookSpec | QuantSpec
    second: CodebookSpec | QuantSpec


_FORMS = (
    MomentForm("8", codebooks.power_spec("uint8", 4, True), codebooks.power_spec("uint8", 4, False)),
    MomentForm("4", codebooks.power_spec("uint4", 2, True), codebooks.power_spec("uint4", 2, False)),
    MomentForm("float8", _FLOAT8, _FLOAT8),
)
FORMS = {form.name: form for form in _FORMS}
"""The forms of quantized moments by name; "32", fp32 values m and v, has no specs."""


class Moment(NamedTuple):
    """A moment in memory: codes (packed if they have less than 8 bits) and scales of blocks, or fp32 values alone."""

    data: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True)
class AdamStep:
    """The numbers of a step; see the top of the file."""

    form: str  # a name of `FORMS`, or "32"
    beta1: float
    beta2: float
    eps: float
    decay: float
    l2: float
    step_size: float
    correction: float
    key: int | None = None  # of the random bits, 32 bits; None to round to nearest
    first: int = 0  # number of the first element of the weight, where it is a shard


@custom_ops.by_device
@torch.no_grad()
def adam_step(weight: Tensor, grad: Tensor, moments: list[Moment], blocks: FlatBlocks, step: AdamStep) -> None:
    """One step, in place; this function defines the numbers.

    Args:
        weight, grad: of as many elements, contiguous; fp32, bf16 or fp16.
        moments: m and s (in fp32: v), and with amsgrad the largest s (v).
        blocks: how the elements are divided into blocks.
    """
    w, g = weight.reshape(-1).float(), grad.reshape(-1).float()
    first, second, *highest = [_read(moment, i, blocks, step.form) for i, moment in enumerate(moments)]
    if step.l2:
        g = g + w * step.l2
    m = first * step.beta1 + g * (1 - step.beta1)
    is_root = step.form != "32"
    v = (second * second if is_root else second) * step.beta2 + g * g * (1 - step.beta2)
    if is_root:
        v = torch.where(g.isfinite(), v.clamp(max=torch.finfo(torch.float32).max), v)
    s = _root(v)
    new = [m, s if is_root else v]
    if highest:
        s = torch.maximum(highest[0] if is_root else _root(highest[0]), s)
        new.append(s if is_root else torch.maximum(highest[0], v))
    w = w * step.decay - m / (s * step.correction + step.eps) * step.step_size
    for i, (moment, values) in enumerate(zip(moments, new, strict=True)):
        _write(moment, values, i, blocks, step.form)
    if step.key is not None and weight.dtype == torch.bfloat16:
        w = rounded_up_at_random(w, step.key, step.first)
    weight.copy_(w.reshape(weight.shape))


def _root(x: Tensor) -> Tensor:
    """The square root rounded to nearest; that of torch on CPU, from MKL, is wrong in the last bit here and there."""
    return x.double().sqrt().float()


def _spec(index: int, form: str) -> CodebookSpec | QuantSpec:
    return FORMS[form].second if index else FORMS[form].first


def _read(moment: Moment, index: int, blocks: FlatBlocks, form: str) -> Tensor:
    """The values of a moment, flat."""
    if moment.scale is None:
        return moment.data.reshape(-1)
    spec, codes = _spec(index, form), moment.data
    if can_pack_bits(spec.dtype):
        codes = unpack_codes(codes, spec.dtype, blocks.block)
    if isinstance(spec, QuantSpec):
        values = spec.dequantize(codes, moment.scale, None)
    else:
        table = torch.tensor(spec.table, dtype=torch.float32, device=codes.device)
        values = spec.dequantize(codes, moment.scale, table)
    return blocks.merge(values).reshape(-1)


def _write(moment: Moment, values: Tensor, index: int, blocks: FlatBlocks, form: str) -> None:
    if moment.scale is None:
        moment.data.copy_(values.reshape(moment.data.shape))
        return
    spec, matrix = _spec(index, form), blocks.split(values)
    scale, other = spec.choose_qparams(matrix)
    codes = spec.quantize(matrix, scale, other)  # type: ignore[arg-type]
    if index:
        codes = torch.maximum(codes.view(torch.uint8), (matrix > 0).to(torch.uint8)).view(codes.dtype)
    if can_pack_bits(spec.dtype):
        codes = pack_codes(codes, spec.dtype)
    moment.data.copy_(codes)
    moment.scale.copy_(scale)


_MASK = 0xFFFFFFFF


def random_bits(count: int, key: int, first: int, device: torch.device) -> Tensor:
    """16 random bits for each element, int32: of the hash "lowbias32" (Wellons, https://nullprogram.com/blog/2018/07/31)
    of its number, multiplied by an odd number, plus the key."""
    x = ((torch.arange(count, device=device) + first) * 0x9E3779B9 + key) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return ((x ^ (x >> 16)) >> 16).int()


def rounded_up_at_random(w: Tensor, key: int, first: int) -> Tensor:
    """`w` fp32, contiguous, with the bits of bf16, rounded up or down at random so that it is right on average."""
    bits = w.view(torch.int32)
    up = (bits + random_bits(w.numel(), key, first, w.device).view(bits.shape)) & -65536
    # Infinity and NaN are not rounded.
    return torch.where((bits & 0x7F800000) != 0x7F800000, up, bits).view(torch.float32)


def key_of(step: int, index: int) -> int:
    """The key of a parameter's random bits in a step: a hash of the number of the step and that of the parameter."""
    x = (step * 0x9E3779B1 + index * 0x85EBCA77 + 0x27D4EB2F) & _MASK
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & _MASK
    x = ((x ^ (x >> 12)) * 0x297A2D39) & _MASK
    return x ^ (x >> 15)


_MOST = torch.finfo(torch.float32).max
LARGEST_SCALE = {"32": 0.0, "8": _MOST, "4": _MOST, "float8": torch.finfo(torch.bfloat16).max / 448.5}
"""As the specs of the form have it, see `CodebookSpec.choose_scale` and `choose_qparams_affine_with_min_max`."""

_BITS = {"8": 8, "4": 4, "float8": 8}


def check_step(weight: Tensor, grad: Tensor, moments: list[Moment], blocks: FlatBlocks, step: AdamStep) -> None:
    """Raise `ValueError` if a kernel would read or write outside of these tensors."""
    count = blocks.rows * blocks.length
    wanted: list[tuple[str, Tensor | None, int, tuple[torch.dtype, ...]]] = []
    wanted += [("weight", weight, count, registry.FLOATS), ("grad", grad, count, registry.FLOATS)]
    for name, moment in zip(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), moments, strict=False):
        if step.form == "32":
            wanted.append((name, moment.data, count, (torch.float32,)))
            continue
        rows, width = blocks.shape
        bits = _BITS[step.form]
        dtype = torch.float8_e4m3fn if step.form == "float8" else torch.uint8
        wanted.append((name, moment.data, rows * (packed_length(width, bits) if bits < 8 else width), (dtype,)))
        wanted.append((f"{name}'s scale", moment.scale, rows, (torch.float32,)))
    for name, tensor, size, dtypes in wanted:
        ok = tensor is not None and tensor.numel() == size and tensor.dtype in dtypes and tensor.is_contiguous()
        if tensor is None or not ok or tensor.device != weight.device:
            found = "None" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            raise ValueError(
                f"adam_step: {name} must have {size} contiguous elements of {' or '.join(map(str, dtypes))} on "
                f"{weight.device}, got {found}"
            )
        if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + size) * tensor.itemsize:
            raise ValueError(f"adam_step: {name} has no memory: its storage was resized")
