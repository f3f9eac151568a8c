"""Linear with int8 activations and integer weights, compiled: the equation and the exact results of `int8_scaled_mm`.

The activation is quantized in the same call if its spec quantizes each row by itself.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...primitives import MappingType, QuantSpec, Rounding, is_compiling, qdtype
from ...primitives.tracing import see_operators
from ..custom_ops import Name, Size, implement, note, opaque, portable, recording
from ..linear import scaled
from ..ops.int8_grouped_mm import int8_grouped_mm, int8_product
from ..ops.int_matmul import int32_terms
from ..ops.quantize import has_default_scales, quantize_input
from ..registry import FLOATS, Problem, from_rows, needs_floats, split_bias, to_rows
from . import code_values, variants, weight
from .compiled_library import TYPES, library, threads
from .memory import address, empty
from .operands import MOST_TERMS, product_of_rows, readers
from .structs import Input, IntCall, Output, Quantizer, Weight, pack, struct_of
from .weight_only import CompiledLinear, Numerics, where_finite

Fields: TypeAlias = tuple[float, float, float, float, float, float]  # of `Quantizer`
NO_QUANTIZER: Fields = (0, 0, 0, 0, 0, 0)  # integers, since graphs of any size take global floats for inputs
GROUP_MULTIPLE = 32  # the size of the groups of a weight is a multiple of this


class Int8Linear(CompiledLinear):
    """Of `cpu_int8_mm`."""

    name, call = "int8_mm", IntCall

    def static_linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor | None:
        """`linear` with the scale and zero point that the weight gives for x."""
        xs, xz = of_rows(weight.act_scale, weight.act_zero_point, x.numel() // self._row[0])
        numerics = *self.numerics[:-2], address(xs, torch.float32), address(xz, torch.int32)
        return self.linear(x, weight, bias, numerics)

    @classmethod
    def prepare(cls, weight: Any) -> None:
        super().prepare(weight)
        made = cls.made_of(weight.qdata)
        if made is not None and weight.scheme.spec.static and weight.fast_linear is not None:
            vars(weight)["fast_linear"] = made.static_linear


@opaque(lambda x, *rest: x.new_empty(x.shape[0], rest[9], dtype=rest[-2]))
def cpu_int8_mm(
    x: Tensor, xs: Tensor | None, xz: Tensor | None,
    low: float, high: float, asymmetric: float, given: float, smallest: float, largest: float,
    codes: Tensor, n: Size, ws: Tensor, wz: Tensor | None, packed: bool, weight_dtype: Name,
    dtype: torch.dtype, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The equation, y (M, N).

    Args:
        x: (M, K) int8 codes; or fp32, bf16 or fp16, which is quantized here.
        xs, xz: scale and zero point, (M, 1) or (1, 1), of the codes or to quantize x with; None to choose them from
            each row.
        low, ..., largest: quantizer of x in floats, see `row_quantizer` and `static_quantizer`; else `NO_QUANTIZER`.
        codes: (N, K) int8 or uint8, or packed along K.
        ws, wz: (N, G), or (1, 1).
        weight_dtype: name of a `QDType`.
        dtype: of the result.
        bias: (N) in that dtype, or None.
    """
    quantizer = (low, high, asymmetric, given, smallest, largest)
    return _multiply(x, xs, xz, quantizer, codes, n, ws, wz, packed, weight_dtype, dtype, bias)


def _multiply(
    x: Tensor, xs: Tensor | None, xz: Tensor | None, quantizer: Sequence[float],
    codes: Tensor, n: int, ws: Tensor, wz: Tensor | None, packed: bool, weight_dtype: str,
    dtype: torch.dtype, bias: Tensor | None, scales: code_values.QuantizedScales | None = None,
) -> Tensor:  # fmt: skip
    """`cpu_int8_mm`, also where `ws` are codes of `scales`."""
    m, k = x.shape
    if not k:
        zeros = x.new_zeros(m, n, dtype=dtype)
        return zeros if bias is None else zeros.add_(bias)
    weight.check_bias(bias, dtype, n)
    numerics = numerics_of(quantizer)
    about = (n, k, weight_dtype, packed, "INT", 0.0, x.dtype, dtype, "int8", numerics)
    layer = Int8Linear.of(codes, ws, wz, *about, scales=scales)
    compiled, variant = layer.compiled, layer.variant(m)

    def in_torch() -> Tensor:
        of_weight = ws if scales is None else scales.numbers(ws, wz)[0]
        y = multiply_in_torch(x, xs, xz, quantizer, codes, of_weight, wz, packed, weight_dtype, dtype)
        return y if bias is None else y.add_(bias)

    if compiled is None or variant == "torch":
        return in_torch()
    if recording():
        note(f"cpu_int8_mm.{compiled.instruction_set}.{variant}")
    x = x if x.stride(1) == 1 else x.contiguous()
    if xs is not None:
        xs, xz = of_rows(xs, xz, m)
        numerics = numerics_of(quantizer, address(xs, torch.float32), address(xz, torch.int32))
    y, finite = layer.run(x, x.stride(0), m, (m, n), bias, variant, numerics)
    return y if finite else where_finite(y, x, in_torch)


def multiply_in_torch(
    x: Tensor, xs: Tensor | None, xz: Tensor | None, quantizer: Sequence[float],
    codes: Tensor, ws: Tensor, wz: Tensor | None, packed: bool, weight_dtype: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The variant "torch" of `cpu_int8_mm`: torch's product of bytes."""
    note("cpu_int8_mm.torch")
    xq, scale, zero = (x, xs, xz) if x.dtype is torch.int8 else quantize_rows(x, quantizer, xs, xz)
    assert scale is not None
    if packed:
        return scaled.packed_int8_mm(xq, scale, zero, codes, ws, wz, weight_dtype, dtype)
    return int8_grouped_mm(xq, scale, zero, codes, ws, wz, dtype)


@implement("int8_product", "cpu")
def compiled_product(
    xq: Tensor, xs: Tensor, xz: Tensor | None, wq: Tensor, ws: Tensor, wz: Tensor | None, group: int, dtype: torch.dtype
) -> Tensor:
    """See `int8_product`: compiled for a weight with groups; with one, torch's product, and in graphs torch operators,
    which a compiler can fuse."""
    in_rows = group == -1 and xz is None and wz is None and wq.dtype is torch.int8 and xq.shape[1] <= MOST_TERMS
    if in_rows and dtype in FLOATS and (compiled := readers(xq, wq)) is not None:
        return product_of_rows(compiled, xq, xs, wq, ws, dtype)
    most = int32_terms(xz is not None, wz is not None or wq.dtype is torch.uint8)
    if dtype not in FLOATS or group % GROUP_MULTIPLE or group > most:
        return portable(int8_product)(xq, xs, xz, wq, ws, wz, group, dtype)
    kind = "int8" if wq.dtype == torch.int8 else "uint8"
    return cpu_int8_mm(xq, xs, xz, *NO_QUANTIZER, wq, wq.shape[0], ws.contiguous(), wz, False, kind, dtype, None)


def numerics_of(quantizer: Sequence[float], scale: int = 0, zero_point: int = 0) -> Numerics:
    """The fields of the struct about x: how to quantize it, and the addresses of its scales and zero points."""
    return *Quantizer.of(quantizer), scale, zero_point


def of_rows(xs: Tensor, xz: Tensor | None, m: int) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point for each row, in memory of their own: a quantizer may write NaN into the scales."""
    return empty((m, 1), torch.float32).copy_(xs), None if xz is None else empty((m, 1), torch.int32).copy_(xz)


def quantize_rows(
    x: Tensor, quantizer: Sequence[float], xs: Tensor | None = None, xz: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scale, zero_point) of the rows of x (M, K), by a `row_quantizer`, or by a `static_quantizer` with the
    given scale and zero point."""
    compiled = library()
    if compiled is None:
        raise RuntimeError("quantize_rows needs the compiled kernels")
    m, k = x.shape
    x = (x if x.stride(1) == 1 else x.contiguous()).resolve_neg()
    codes = empty((m, k), torch.int8)
    if xs is not None:
        scale, zero_point = of_rows(xs, xz, m)
    else:
        scale, zero_point = empty((m, 1), torch.float32), empty((m, 1), torch.int32) if quantizer[2] else None
    numbers = (Quantizer.of(quantizer), address(scale, torch.float32), address(zero_point, torch.int32))
    of_x, of_codes = (address(x), TYPES[x.dtype], x.stride(0), m), (address(codes), TYPES[torch.int8], k, 0)
    call = IntCall(Input(*of_x), Output(*of_codes), *numbers, 0, threads())
    compiled.quantize_rows(bytes(struct_of(Weight).size) + pack(call))
    return codes, scale, zero_point


@functools.cache
def row_quantizer(spec: QuantSpec) -> Fields | None:
    """(low, high, asymmetric, given, smallest scale, largest scale) for a spec with dynamic scales; None if the
    compiled quantizer does not support it."""
    return dynamic_quantizer(spec) if spec.granularity.pattern(2) == (1, -1) else None


def dynamic_quantizer(spec: QuantSpec) -> Fields | None:
    """`row_quantizer`, whatever shares a scale."""
    symmetric = spec.mapping is MappingType.SYMMETRIC and not spec.has_zero_point
    asymmetric = spec.mapping is MappingType.ASYMMETRIC and spec.zero_point_domain.name == "INT"
    if spec.dtype is not qdtype("int8") or not (symmetric or asymmetric) or not has_default_scales(spec):
        return None
    low, high = spec.code_range
    limits = torch.finfo(torch.float32)
    largest = min(limits.max, torch.finfo(torch.bfloat16).max / ((high - low + 1) / 2))
    return float(low), float(high), float(asymmetric), 0.0, max(limits.tiny, spec.eps or 0.0), largest


@functools.cache
def static_quantizer(spec: QuantSpec, kinds: tuple[str, ...] = ("int8",)) -> Fields | None:
    """`row_quantizer` for a spec of these dtypes whose scale and zero point are given."""
    real_zero = spec.zero_point_domain.is_real and spec.has_zero_point
    if spec.dtype.name not in kinds or real_zero or spec.rounding is not Rounding.NEAREST_EVEN:
        return None
    low, high = spec.code_range
    return float(low), float(high), 0.0, 1.0, 0.0, 0.0


def activation_of(rows: Tensor, quantized: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Fields]:
    """The first arguments of `cpu_int8_mm` for an input (M, K) of this weight, which is quantized here if the compiled
    quantizer does not support its spec."""
    scheme = quantized.scheme
    static = scheme.spec.static
    quantizer = static_quantizer(scheme.activation) if static else row_quantizer(scheme.activation)
    if quantizer is None:
        return *quantize_input(rows, quantized), NO_QUANTIZER
    given = (quantized.act_scale, quantized.act_zero_point) if static else (None, None)
    return rows, *given, quantizer


def supports(problem: Problem) -> str | None:
    """Why the kernel does not take the problem, or None."""
    if reason := scaled.supports_int32(problem) or weight.supports(problem) or needs_floats(problem):
        return reason
    columns, group = problem.scheme.shape[1], problem.scheme.weight.block_size(problem.scheme.shape)[1]
    fits = group == columns or group % GROUP_MULTIPLE == 0
    return None if fits else f"takes groups of a multiple of {GROUP_MULTIPLE}, the weight has {group}"


@weight.register_compiled(
    "linear", activation=("int8",), supports=supports, checks_memory=True, advice=variants.advice, name="cpu_int8_mm",
)  # fmt: skip
def _linear(x: Tensor, quantized: Any, bias: Tensor | None) -> Tensor:
    scheme = quantized.scheme
    xq, xs, xz, quantizer = activation_of(to_rows(x), quantized)
    packed = scheme.layout.packed_axis is not None
    added, bias = split_bias(bias, x, scheme.shape[0])
    is_dense = quantized.scale_scale is None or see_operators()
    arguments: tuple[Any, ...] = (
        quantized.qdata, scheme.shape[0], quantized.dense_scale() if is_dense else quantized.scale,
        quantized.zero_point, packed, scheme.weight.dtype.name, x.dtype, added,
    )  # fmt: skip
    if is_dense:
        y = cpu_int8_mm(xq, xs, xz, *quantizer, *arguments)
    else:
        y = _multiply(xq, xs, xz, quantizer, *(*arguments, code_values.QuantizedScales.of(quantized)))
    if not is_compiling() and any(quantizer):
        Int8Linear.prepare(quantized)
    return from_rows(y, x, bias)
