"""Products with the matrices of experts, compiled: one call for all experts of a product.

    y[t * R + r] = x[t] dequantize(w[experts[t, r]])^T

Rows are sorted by expert inside the call (src/experts.h); each expert is multiplied by the way that `ways.py` has for
its number of rows. An activation is quantized once for all experts of a row.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..custom_ops import note, opaque, recording
from ..linear.int8_scaled import INTEGERS
from ..ops.experts import expert_by_expert, scheme_of_expert
from ..registry import Problem, register
from . import int8, ways, weight, weight_only
from .compiled_library import TYPES, library, threads
from .compiled_linear import Numerics
from .int8 import cpu_int8_mm, numerics_of, of_rows, quantize_rows
from .structs import ExpertsCall, ExpertsIntCall, pack, struct_of
from .ways import WAYS
from .weight import CompiledWeight
from .weight_only import cpu_weight_only_mm

NO_LIMIT = 2**62
"""Rows of the last of the ways."""


class _Experts(CompiledWeight):
    """The matrices of all experts as one weight (E * N, K), and the ways by the number of rows of an expert.

    A subclass has the function's `name` in `Library`, and `call`, the struct that it takes after the weight.
    """

    __slots__ = ("_call", "_count", "_fastest", "_steps", "_ways", "_weight", "compiled")

    name: ClassVar[str]
    call: ClassVar[type]

    def __init__(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *about: Any) -> None:
        """See `of`; the last of `about` are E, and the name of x in `ways`."""
        super().__init__(codes, scale, zero_point, *about)
        n, k, _, packed, _, _, self._count, kind = about
        self.compiled = library() if self.fields else None
        if self.compiled is None:
            return
        self._call, self._weight = getattr(self.compiled, self.name), pack(self.fields)
        # By the size of all, which stream through the caches even if each is small.
        instructions = self.compiled.instruction_set
        self._fastest = ways.steps(instructions, ways.key_of(kind, packed, scale.shape[-1] > 1, n * k))
        otherwise = WAYS["amx" if kind != "int8" and instructions == "amx" else "tile"]
        steps = [(NO_LIMIT if rows is None else rows, WAYS.get(way, otherwise)) for rows, way in self._fastest]
        self._steps = len(steps)
        self._ways = (ctypes.c_int64 * (2 * self._steps))(*(number for step in steps for number in step))

    @staticmethod
    def as_matrix(tensor: Tensor) -> Tensor:
        """(E, N, K) as (E * N, K), a view."""
        return tensor.view(-1, tensor.shape[-1])

    def is_fastest(self, rows: int) -> bool:
        """Whether the compiled call is at least as fast as other ways, for so many rows in all."""
        if self.compiled is None:
            return False
        mean = rows // self._count
        return next(way for most, way in self._fastest if most is None or mean <= most) in WAYS

    def run(self, x: Tensor, experts: Tensor, n: int, dtype: torch.dtype, numerics: Numerics) -> Tensor:
        """y (T * R, N) in `dtype`."""
        rows, share = experts.numel(), experts.shape[1]
        y = torch.empty(rows, n, dtype=dtype)
        # By position, in the order of the structs' fields.
        of_call = struct_of(self.call).pack(
            *(experts.data_ptr(), rows, self._count, share, ctypes.addressof(self._ways), self._steps),
            *(x.data_ptr(), TYPES[x.dtype], x.stride(0), x.shape[0]),
            *(y.data_ptr(), TYPES[dtype], n, 0),
            *numerics,
            threads(),
        )
        self._call(self._weight + of_call)
        return y


class _FloatExperts(_Experts):
    __slots__ = ()
    name, call = "experts_mm", ExpertsCall


class _IntExperts(_Experts):
    __slots__ = ()
    name, call = "experts_int8_mm", ExpertsIntCall


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
    if _is_stack(codes):
        middle = (low + high + 1) / 2
        about = (count * n, k, dtype, packed, domain, middle, count, x.dtype)
        layer = _FloatExperts.of(codes, scale, zero_point, *about)
    if layer is None or not layer.is_fastest(rows):

        def product(of_input: Tensor, e: int) -> Tensor:
            factors = scale[e % len(scale)], None if zero_point is None else zero_point[e % len(zero_point)]
            return cpu_weight_only_mm(x[of_input], codes[e], n, *factors, packed, dtype, low, high, domain, None)

        return expert_by_expert(x, experts, count, n, product)
    if recording():
        note(f"cpu_experts_mm.{layer.compiled.instruction_set}")  # type: ignore[union-attr]
    return layer.run(x, experts, n, x.dtype, ())


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
    layer = None
    if _is_stack(codes):
        layer = _IntExperts.of(codes, ws, wz, count * n, k, weight_dtype, packed, "INT", 0.0, count, "int8")
    if layer is None or not layer.is_fastest(rows):
        if x.dtype is not torch.int8:
            x, xs, xz = quantize_rows(x, quantizer, xs, xz)
        assert xs is not None
        of_x = x, *of_rows(xs, xz, m, writable=False)

        def product(of_input: Tensor, e: int) -> Tensor:
            rows, scale, zero = (None if t is None else t[of_input] for t in of_x)
            factors = ws[e % len(ws)], None if wz is None else wz[e % len(wz)]
            assert rows is not None
            return cpu_int8_mm(rows, scale, zero, [], codes[e], n, *factors, packed, weight_dtype, dtype, None)

        return expert_by_expert(x.new_empty(0, dtype=dtype), experts, count, n, product)
    numerics = numerics_of(quantizer)
    if xs is not None:
        xs, xz = of_rows(xs, xz, m, writable=x.dtype is not torch.int8)
        numerics = numerics_of(quantizer, xs.data_ptr(), 0 if xz is None else xz.data_ptr())
    if recording():
        note(f"cpu_experts_int8_mm.{layer.compiled.instruction_set}")  # type: ignore[union-attr]
    return layer.run(x, experts, n, dtype, numerics)


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


def _is_stack(codes: Tensor) -> bool:
    """Whether the rows of all experts are evenly spaced in memory."""
    return codes.stride(2) == 1 and codes.stride(0) == codes.shape[1] * codes.stride(1)


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
    name="cpu_experts_mm",
)
def _grouped_linear(x: Tensor, quantized: Any, experts: Tensor) -> Tensor:
    form = weight.form(quantized.scheme)
    return cpu_experts_mm(x, experts, quantized.qdata, quantized.dense_scale(), quantized.dense_zero_point(), *form)


@register(
    "grouped_linear",
    layout=("plain", "packed"),
    weight=INTEGERS,
    activation=("int8",),
    device="cpu",
    priority=30,
    supports=_supports_int8,
    checks_memory=True,
    name="cpu_experts_int8_mm",
)
def _grouped_linear_int8(x: Tensor, quantized: Any, experts: Tensor) -> Tensor:
    scheme = quantized.scheme
    packed = scheme.layout.packed_axis is not None
    rows, xs, xz, quantizer = int8.activation_of(x, quantized)
    ws, wz, kind = quantized.dense_scale(), quantized.zero_point, scheme.weight.dtype.name
    return cpu_experts_int8_mm(rows, experts, xs, xz, quantizer, quantized.qdata, ws, wz, packed, kind, x.dtype)
