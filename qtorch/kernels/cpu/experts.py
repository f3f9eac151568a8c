"""Products with the matrices of experts, compiled: one call for all experts of a product.

    y[t * R + r] = x[t] dequantize(w[experts[t, r]])^T

Rows are sorted by expert inside the call (src/experts.h); each expert is multiplied by the way that `ways.py` has for
its number of rows. An activation is quantized once for all experts of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..custom_ops import note, opaque, recording
from ..linear.int8_scaled import INTEGERS
from ..ops.experts import expert_by_expert, scheme_of_expert
from ..registry import Problem, register
from . import int8, ways, weight, weight_only
from .compiled_experts import FloatExperts, IntExperts, is_stack
from .compiled_linear import where_finite
from .int8 import cpu_int8_mm, numerics_of, of_rows, quantize_rows
from .memory import address
from .weight_only import cpu_weight_only_mm


@opaque(lambda x, experts, codes, *_: x.new_empty(experts.shape[0] * experts.shape[1], codes.shape[1]))
def cpu_experts_mm(
    x: Tensor,
    experts: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    packed: bool,
    dtype: str,
    low: float,
    high: float,
    domain: str,
) -> Tensor:
    """The equation above, x in floating point.

    Args:
        x: (T, K) fp32, bf16 or fp16.
        experts: (T, R) int64; an index that names no expert gives a row of zeros.
        codes: (E, N, K) in the storage dtype of `dtype`, the name of a `QDType`; or packed along K.
        scale, zero_point: (E, N, G), G groups of a row, or (1, 1, 1).
        low, high, domain: see `cpu_weight_only_mm`.

    Returns:
        (T * R, N) in the dtype of x.
    """
    x, experts, scale = _checked(x, experts, codes, scale)
    (count, n), k, rows = codes.shape[:2], x.shape[1], experts.numel()
    if not (rows and n and k):
        return x.new_zeros(rows, n)
    layer = None
    if is_stack(codes):
        middle = (low + high + 1) / 2
        about = (count * n, k, dtype, packed, domain, middle, count, x.dtype, x.dtype, ())
        layer = FloatExperts.of(codes, scale, zero_point, *about)

    def product(of_input: Tensor, e: int) -> Tensor:
        factors = scale[e % len(scale)], None if zero_point is None else zero_point[e % len(zero_point)]
        return cpu_weight_only_mm(x[of_input], codes[e], n, *factors, packed, dtype, low, high, domain, None)

    def one_by_one() -> Tensor:
        return expert_by_expert(x, experts, count, n, product)

    if layer is None or not layer.is_fastest(rows):
        return one_by_one()
    if recording():
        note(f"cpu_experts_mm.{layer.compiled.instruction_set}")  # type: ignore[union-attr]
    y, finite = layer.run(x, experts, ())
    return y if finite else where_finite(y, x, one_by_one, experts.shape[1])


def _empty_int8(x: Tensor, experts: Tensor, *rest: Any) -> Tensor:
    codes, dtype = rest[3], rest[-1]
    return x.new_empty(experts.shape[0] * experts.shape[1], codes.shape[1], dtype=dtype)


@opaque(_empty_int8)
def cpu_experts_int8_mm(
    x: Tensor,
    experts: Tensor,
    xs: Tensor | None,
    xz: Tensor | None,
    quantizer: list[float],
    codes: Tensor,
    ws: Tensor,
    wz: Tensor | None,
    packed: bool,
    weight_dtype: str,
    dtype: torch.dtype,
) -> Tensor:
    """The equation above with both operands in codes, and the exact results of `cpu_int8_mm`.

    Args:
        x, xs, xz, quantizer, weight_dtype, dtype: as there, x (T, K).
        experts, codes, ws, wz: as in `cpu_experts_mm`.

    Returns:
        (T * R, N) in `dtype`.
    """
    x, experts, ws = _checked(x, experts, codes, ws)
    (m, k), (count, n), rows = x.shape, codes.shape[:2], experts.numel()
    if not (rows and n and k):
        return x.new_zeros(rows, n, dtype=dtype)
    layer, numerics = None, numerics_of(quantizer)
    if is_stack(codes):
        about = (count * n, k, weight_dtype, packed, "INT", 0.0, count, dtype, "int8", numerics)
        layer = IntExperts.of(codes, ws, wz, *about)

    def one_by_one() -> Tensor:
        xq, factor, zero_point = (x, xs, xz) if x.dtype is torch.int8 else quantize_rows(x, quantizer, xs, xz)
        assert factor is not None
        of_x = xq, *of_rows(factor, zero_point, m, writable=False)

        def product(of_input: Tensor, e: int) -> Tensor:
            rows, scale, zero = (None if t is None else t[of_input] for t in of_x)
            factors = ws[e % len(ws)], None if wz is None else wz[e % len(wz)]
            assert rows is not None
            return cpu_int8_mm(rows, scale, zero, [], codes[e], n, *factors, packed, weight_dtype, dtype, None)

        return expert_by_expert(x.new_empty(0, dtype=dtype), experts, count, n, product)

    if layer is None or not layer.is_fastest(rows):
        return one_by_one()
    if xs is not None:
        of_x = of_rows(xs, xz, m, writable=x.dtype is not torch.int8)
        numerics = numerics_of(quantizer, address(of_x[0], torch.float32), address(of_x[1], torch.int32))
    if recording():
        note(f"cpu_experts_int8_mm.{layer.compiled.instruction_set}")  # type: ignore[union-attr]
    y, finite = layer.run(x, experts, numerics)
    return y if finite else where_finite(y, x, one_by_one, experts.shape[1])


def _checked(x: Tensor, experts: Tensor, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, the index and the scales, as the compiled functions read them.

    Raises:
        ValueError: shapes, dtypes or devices are others.
    """
    if (
        x.dim() != 2
        or codes.dim() != 3
        or scale.dim() != 3
        or experts.dim() != 2
        or experts.shape[0] != x.shape[0]
        or experts.dtype is not torch.int64
        or not (x.is_cpu and experts.is_cpu)
    ):
        raise ValueError(
            f"experts take rows (T, K) and an int64 index (T, R) on the CPU, and codes and scales of three axes; got "
            f"{tuple(x.shape)} on {x.device}, {tuple(experts.shape)} of {experts.dtype} on {experts.device}, "
            f"codes {tuple(codes.shape)} and scales {tuple(scale.shape)}"
        )
    return x if x.stride(1) == 1 else x.contiguous(), experts.contiguous(), scale.contiguous()


def _of_expert(problem: Problem) -> Problem | str:
    """The problem of one expert as a linear layer, or why the experts are not multiplied together."""
    scheme = problem.scheme
    if len(scheme.shape) != 3:
        return f"takes experts (E, N, K), the weight has shape {scheme.shape}"
    if scheme.layout.packed_axis not in (None, -1):
        return "takes codes packed along rows, this weight is transposed"
    if 0 in scheme.shape:
        return f"takes experts with elements, the weight has shape {scheme.shape}"
    block = scheme.weight.block_size(scheme.shape)
    if block[:2] != (1, 1) and block != scheme.shape:
        return f"takes scales per row, group of a row or tensor, the weight has {scheme.weight.granularity}"
    matrix = scheme_of_expert(scheme)
    assert matrix is not None
    return problem._replace(op="linear", scheme=matrix)


def _supports(problem: Problem) -> str | None:
    of_expert = _of_expert(problem)
    return of_expert if isinstance(of_expert, str) else weight_only.supports(of_expert)


def _supports_int8(problem: Problem) -> str | None:
    of_expert = _of_expert(problem)
    if isinstance(of_expert, str):
        return of_expert
    activation = problem.scheme.activation
    assert activation is not None
    if not problem.scheme.spec.static and activation.granularity.pattern(2)[0] != 1:
        return f"takes activations whose rows are quantized by themselves, the scheme has {activation.granularity}"
    return int8.supports(of_expert)


@register(
    "grouped_linear",
    layout=("plain", "packed"),
    weight=INTEGERS,
    activation=(),
    device="cpu",
    priority=30,
    supports=_supports,
    checks_memory=True,
    advice=ways.advice,
    name="cpu_experts_mm",
)
def _grouped_linear(x: Tensor, quantized: Any, experts: Tensor) -> Tensor:
    form = weight.form(quantized.scheme)
    y = cpu_experts_mm(x, experts, quantized.qdata, quantized.dense_scale(), quantized.dense_zero_point(), *form)
    if not torch.compiler.is_compiling():
        FloatExperts.prepare(quantized)
    return y


@register(
    "grouped_linear",
    layout=("plain", "packed"),
    weight=INTEGERS,
    activation=("int8",),
    device="cpu",
    priority=30,
    supports=_supports_int8,
    checks_memory=True,
    advice=ways.advice,
    name="cpu_experts_int8_mm",
)
def _grouped_linear_int8(x: Tensor, quantized: Any, experts: Tensor) -> Tensor:
    scheme = quantized.scheme
    packed = scheme.layout.packed_axis is not None
    rows, xs, xz, quantizer = int8.activation_of(x, quantized)
    ws, wz, kind = quantized.dense_scale(), quantized.zero_point, scheme.weight.dtype.name
    y = cpu_experts_int8_mm(rows, experts, xs, xz, quantizer, quantized.qdata, ws, wz, packed, kind, x.dtype)
    if not torch.compiler.is_compiling() and quantizer and not scheme.spec.static:
        IntExperts.prepare(quantized)
    return y
