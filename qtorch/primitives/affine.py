"""Affine quantization: q = round(x / scale) + zero_point, and back.

Quantization has four stages, each usable alone: choose the range of each block, choose the scale and zero
point, quantize, dequantize. Names and argument orders are those of torchao 0.6. Where torch has the same operation
(`torch.ops.quantized_decomposed.*`, `torch.fake_quantize_per_tensor_affine`, ...), results on fp32 are bit-identical.

All arithmetic is in fp32, for inputs of any dtype. Scales have as many axes as the input (see `granularity`).

    domain       quantize                                            dequantize
    INT          clamp(round(x / scale) + zero_point)                (q - zero_point) * scale
    NONE         clamp(round(x / scale))                             q * scale
    FLOAT        clamp(round((x - zero_point) / scale + middle))     (q - middle) * scale + zero_point
    OFFSET       clamp(round((x - zero_point) / scale))              q * scale + zero_point
    FRACTIONAL   clamp(round(x / scale + zero_point))                (q - zero_point) * scale

with middle = (quant_min + quant_max + 1) / 2. FLOAT is the convention of the tinygemm int4 kernels, OFFSET that of GGUF
and MLX, FRACTIONAL that of HQQ. In the last three, zero points are real numbers. Each operation rounds once; none are
fused.
"""

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .granularity import BlockView
from .jsonable import jsonable
from .qdtype import QDType, qdtype
from .rounding import Noise, Rounding, round_to_integer
from .slices import in_slices
from .tracing import is_compiling

# NaN and infinities: most codes cannot represent them, so scales carry them.
# The scale of a block with a NaN or an infinity is NaN, and so is all that is computed with it. If the rows (tokens)
# of an input share a scale, or the scale is given, each row gets a copy of it, which is NaN for rows with such a
# value; the other rows are not affected. The float8 types have a NaN and need no copies: their codes are NaN.


def with_non_finite(values: Tensor, source: Tensor) -> Tensor:
    """`values`, with NaN where `source`, which broadcasts to their shape, is NaN or infinite; a negative zero keeps its
    sign if that of `source` is negative too."""
    if is_compiling():  # for inductor, zero times anything is zero
        return torch.where(source.abs() < torch.inf, values, torch.nan)
    return torch.add(values, source, alpha=0)


def quotient(x: Tensor, divisor: float) -> Tensor:
    """x / divisor with the bits of every device: by a number CUDA multiplies with its reciprocal, by a tensor not."""
    return x / (torch.full((), divisor, dtype=x.dtype, device=x.device) if x.is_cuda else divisor)


def lost_rows(x: Tensor) -> Tensor:
    """Column (M, 1) in fp32: NaN for each row of `x` (M, K) with a NaN or an infinity, 0 for all others."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], 1, dtype=torch.float32)
    # `isfinite` and norms of rows are ten times as slow on CPU.
    highest = x.abs().amax(1, keepdim=True).float()
    return with_non_finite(torch.zeros_like(highest), highest)


def finite_rows(x: Tensor) -> Tensor:
    """The rows of `x` (M, K) without a NaN or an infinity; `x` itself if all are."""
    kept = lost_rows(x).squeeze(1) == 0
    return x if bool(kept.all()) else x[kept]


def without_rows(x: Tensor, lost: Tensor) -> Tensor:
    """`x` (M, K) with zeros in the rows that are NaN in `lost`, the result of `lost_rows`."""
    return torch.where(lost == 0, x, 0)


@jsonable
class MappingType(enum.Enum):
    """How a range [min, max] of reals maps to the range of codes.

    Attributes:
        SYMMETRIC: zero in the middle; scale = max(-min, max) / ((quant_max - quant_min) / 2).
        SYMMETRIC_NO_CLIPPING_ERR: zero in the middle; scale = max(min / quant_min, max / quant_max), with codes counted
            from that of zero, so that neither end clips although there is one more code below zero than above.
        SYMMETRIC_SIGNED: zero in the middle; quant_min is the end of larger magnitude, scale = end / quant_min, with
            codes counted from that of zero: negative if that end is max (Q4_0 and Q5_0 of ggml).
        ASYMMETRIC: min and max map to quant_min and quant_max; scale = (max - min) / (quant_max - quant_min).
    """

    SYMMETRIC = "symmetric"
    SYMMETRIC_NO_CLIPPING_ERR = "symmetric_no_clipping_err"
    SYMMETRIC_SIGNED = "symmetric_signed"
    ASYMMETRIC = "asymmetric"


@jsonable
class ZeroPointDomain(enum.Enum):
    """What a zero point is; the equations are at the top of the file.

    Attributes:
        INT: an integer, the code of zero.
        FLOAT: the real number that the code in the middle of the range stands for.
        NONE: absent; the code of zero is 0.
        OFFSET: the real number that the code 0 stands for.
        FRACTIONAL: the code of zero, a real number that need not be an integer.
    """

    INT = "int"
    FLOAT = "float"
    NONE = "none"
    OFFSET = "offset"
    FRACTIONAL = "fractional"

    @property
    def is_real(self) -> bool:
        """Whether zero points are real numbers, kept in floating point."""
        return self in (ZeroPointDomain.FLOAT, ZeroPointDomain.OFFSET, ZeroPointDomain.FRACTIONAL)

    @property
    def adds_zero_point(self) -> bool:
        """Whether zero points are added to scaled codes, so that a range of codes need not include zero."""
        return self in (ZeroPointDomain.FLOAT, ZeroPointDomain.OFFSET)

    def zero_point_code(self, low: float, high: float) -> float:
        """The code that stands for the zero point in the domains that add it, given the bounds of the codes."""
        return (low + high + 1) / 2 if self is ZeroPointDomain.FLOAT else 0.0


def quantize_affine(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None,
    output_dtype: torch.dtype | QDType, quant_min: float | None = None, quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, *, rounding: Rounding = Rounding.NEAREST_EVEN,
    generator: torch.Generator | None = None, noise: Noise | None = None,
) -> Tensor:  # fmt: skip
    """Codes of `input`, same shape, in the storage dtype of `output_dtype` (int8 for int1..int8, uint8 for
    uint1..uint8).

    The division by the scale is a multiplication by its fp32 reciprocal, as in torch's own quantizers. NaN and
    infinities become NaN in float8. Other types have no code for them: their codes are undefined, and the scale is NaN
    instead.

    Args:
        input: fp32, fp16 or bf16, any shape.
        block_size: elements that share a scale, one size per axis, -1 for a whole axis.
        scale: one element per block.
        zero_point: one element per block, or None for zero.
        output_dtype: type of the codes.
        quant_min, quant_max: narrower bounds of the codes than those of the type.
        zero_point_domain: see the equations at the top of the file.
        rounding, generator: see `round_to_integer`.
        noise: of stochastic rounding, None for a random number of torch's own for each element.

    Raises:
        TypeError: `input` is not in floating point.
    """
    check_floating_point("quantize_affine", input)
    view = BlockView(input.shape, block_size)
    low, high = code_range(output_dtype, quant_min, quant_max)
    kind = qdtype(output_dtype)
    u = _drawn(noise, rounding, view, input.device, generator)

    def quantize(x: Tensor, s: Tensor, z: Tensor | None) -> Tensor:
        x = x.float()
        codes = real_codes(x, s, z, kind, (low, high), zero_point_domain, rounding, generator, u).clamp(low, high)
        return kind.encode(with_non_finite(codes, x) if kind.has_nan else codes, rounding, generator, u)

    x, s, z = view.split(input), view.split_scale(scale), split_zero_point(view, zero_point)
    # Random numbers are drawn for the whole tensor at once.
    codes = in_slices(quantize, x, s, z, axes=x.dim()) if rounding is Rounding.NEAREST_EVEN else quantize(x, s, z)
    return view.merge(codes)


def dequantize_affine(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None,
    input_dtype: torch.dtype | QDType, quant_min: float | None = None, quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Reals of the codes `input`, same shape, in `output_dtype`; computed in fp32.

    Args:
        input: codes in the storage dtype of `input_dtype`.
        block_size, scale, zero_point, input_dtype, quant_min, quant_max, zero_point_domain: as in the call of
            `quantize_affine`.
        output_dtype: a floating-point dtype.

    Raises:
        ValueError: the codes are not in the storage dtype of `input_dtype`.
    """
    kind = qdtype(input_dtype)
    if input.dtype != kind.storage:
        raise ValueError(f"codes of {input_dtype} are stored as {kind.storage}, got {input.dtype}")
    view = BlockView(input.shape, block_size)
    bounds = code_range(input_dtype, quant_min, quant_max)

    def dequantize(codes: Tensor, s: Tensor, z: Tensor | None) -> Tensor:
        return dequantize_split(kind.decode(codes), s, z, bounds, zero_point_domain).to(output_dtype)

    codes, s, z = view.split(input), view.split_scale(scale), split_zero_point(view, zero_point)
    return view.merge(in_slices(dequantize, codes, s, z, axes=codes.dim()))


def check_floating_point(function: str, input: Tensor) -> None:
    """Raise `TypeError` if `input` is not in floating point; the message names `function`."""
    check_tensors(function, input)
    if not input.is_floating_point():
        raise TypeError(f"{function} takes a floating-point tensor, got {input.dtype}: input.float()")


def check_tensors(function: str, *values: Any) -> None:
    """Raise `TypeError` if one of these is no tensor; the message names `function`."""
    for value in values:
        if not isinstance(value, Tensor):
            raise TypeError(f"{function} takes tensors, got {type(value).__name__}")


def code_range(dtype: torch.dtype | QDType, quant_min: float | None, quant_max: float | None) -> tuple[float, float]:
    """Bounds of the codes: those of the type, narrowed by the given ones, which have to lie within (`ValueError`)."""
    kind = qdtype(dtype)
    low = kind.quant_min if quant_min is None else quant_min
    high = kind.quant_max if quant_max is None else quant_max
    if not kind.quant_min <= low < high <= kind.quant_max:
        own = f"{kind.name}'s [{kind.quant_min}, {kind.quant_max}]"
        raise ValueError(f"quant_min={low}, quant_max={high} is not a range within {own}")
    return low, high


def fake_quantize_blocks(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None,
    quant_dtype: torch.dtype | QDType, quant_min: float | None, quant_max: float | None,
    zero_point_domain: ZeroPointDomain, rounding: Rounding = Rounding.NEAREST_EVEN,
    generator: torch.Generator | None = None, compute_dtype: torch.dtype = torch.float32, noise: Noise | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantize and dequantize without storing codes: (result in the input's dtype, mask of unclipped elements), NaN for
    NaN and infinities. The arithmetic is in `compute_dtype`; only in fp32 is the result that of storing codes."""
    view = BlockView(input.shape, block_size)
    low, high = code_range(quant_dtype, quant_min, quant_max)
    kind = qdtype(quant_dtype)
    values = view.split(input.to(compute_dtype))
    s, z = view.split_scale(scale), split_zero_point(view, zero_point)
    u = _drawn(noise, rounding, view, input.device, generator)
    codes = real_codes(values, s, z, kind, (low, high), zero_point_domain, rounding, generator, u)
    clipped = codes.clamp(low, high)
    codes, unclipped = clipped, codes == clipped
    if kind.is_floating_point:
        codes = kind.decode(kind.encode(codes.float(), rounding, generator, u))
    real = with_non_finite(dequantize_split(codes, s, z, (low, high), zero_point_domain), values)
    return view.merge(real).to(input.dtype), view.merge(unclipped)


def _drawn(
    noise: Noise | None, rounding: Rounding, view: BlockView, device: torch.device, generator: torch.Generator | None
) -> Tensor | None:
    """The random numbers of `noise` in the split view, None for those that rounding draws itself."""
    if noise is None or rounding is not Rounding.STOCHASTIC:
        return None
    return view.split(noise.draw(view.shape, device, generator))


def split_zero_point(view: BlockView, zero_point: Tensor | None) -> Tensor | None:
    """Zero points, if there are any, in the split view."""
    return None if zero_point is None else view.split_scale(zero_point)


def real_codes(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, kind: QDType, bounds: tuple[float, float],
    domain: ZeroPointDomain, rounding: Rounding = Rounding.NEAREST_EVEN, generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Codes before clipping, rounded for integer types, in the dtype of `x`; all arguments in the split view."""
    s = scale.to(x.dtype)
    z = None if zero_point is None else zero_point.to(x.dtype)
    if domain.adds_zero_point and z is not None:
        codes = (x - (z - s * domain.zero_point_code(*bounds))) / s
    else:
        codes = x * s.reciprocal()
    if domain is ZeroPointDomain.FRACTIONAL and z is not None:
        codes = codes + z
    if not kind.is_floating_point:
        codes = round_to_integer(codes, rounding, generator, noise)
    return codes + z if domain is ZeroPointDomain.INT and z is not None else codes


def dequantize_split(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, bounds: tuple[float, float], domain: ZeroPointDomain,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Reals of codes, in their dtype; all arguments in the split view. `out` may be `codes`."""
    s = scale.to(codes.dtype)
    if zero_point is None or domain is ZeroPointDomain.NONE:
        return torch.mul(codes, s, out=out)
    z = zero_point.to(codes.dtype)
    if domain.adds_zero_point:
        middle = domain.zero_point_code(*bounds)
        return torch.add(torch.mul(torch.sub(codes, middle, out=out), s, out=out), z, out=out)
    return torch.mul(torch.sub(codes, z, out=out), s, out=out)
