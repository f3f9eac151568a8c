"""Products with the matrices of experts, compiled: one call for all experts of a product.

    y[t * R + r] = x[t] dequantize(w[experts[t, r]])^T

Rows are sorted by expert inside the call (src/experts.h); each expert is multiplied by the variant that `variants.py`
has for its number of rows. An activation is quantized once for all experts of a row. As for linear layers, the second
product with a weight calls `CompiledExperts.grouped` at once.
"""

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...primitives import CodebookSpec, qdtype
from ...primitives.tracing import is_compiling
from ..custom_ops import Name, note, opaque, recording
from ..linear.scaled import INTEGERS
from ..ops.experts import expert_by_expert, scheme_of_expert
from ..registry import Problem, needs_rows
from . import code_values, compiled_library, int8_linear, variants, weight, weight_only
from .int8_linear import NO_QUANTIZER, cpu_int8_mm, numerics_of, of_rows, quantize_rows
from .memory import address, empty
from .structs import ExpertsCall, ExpertsIntCall, pack, struct_of
from .variants import VARIANTS
from .weight import CompiledWeight, register_compiled
from .weight_only import Numerics, cpu_weight_only_mm, where_finite

NO_LIMIT = 2**62  # rows of the last of the variants


class CompiledExperts(CompiledWeight):
    """The matrices of all experts as one weight (E * N, K), and the variants by the number of rows of an expert.

    A subclass has the function's `name` in `Library`, and `call`, the struct that it takes after the weight.

    Attributes:
        dtype: of x and y in calls of `grouped`.
        numerics: as in `CompiledLinear`.
    """

    name: ClassVar[str]
    call: ClassVar[type]

    def __init__(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *about: Any, **more: Any) -> None:
        """See `of`; the last of `about` are E, the dtype of y, the name of x in `variants`, and numerics."""
        super().__init__(codes, scale, zero_point, *about, **more)
        n, k, *_, self._count, self.dtype, kind, self.numerics = about
        self._n, self._row = n // self._count, k
        if self.compiled is None:
            return
        self._call, self._weight = getattr(self.compiled, self.name), pack(self.fields)
        # By the size of all, which stream through the caches even if each is small.
        instructions = self.compiled.instruction_set
        self._fastest = variants.steps(instructions, self.key(kind))
        otherwise = VARIANTS["amx" if kind != "int8" and instructions == "amx" else "tile"]
        self._steps = len(self._fastest)
        self._variants = (ctypes.c_int64 * (2 * self._steps))()
        for i, (rows, variant) in enumerate(self._fastest):
            self._variants[2 * i] = NO_LIMIT if rows is None else rows
            self._variants[2 * i + 1] = VARIANTS.get(variant, otherwise)

    @staticmethod
    def as_matrix(tensor: Tensor) -> Tensor:
        """(E, N, K) as (E * N, K), a view."""
        return tensor.view(-1, tensor.shape[-1])

    def is_fastest(self, rows: int) -> bool:
        """Whether the compiled call is at least as fast as other variants, for so many rows in all."""
        if self.compiled is None:
            return False
        mean = rows // self._count
        return next(variant for most, variant in self._fastest if most is None or mean <= most) in VARIANTS

    def run(self, x: Tensor, experts: Tensor, numerics: Numerics) -> tuple[Tensor, bool]:
        """y (T * R, N), and whether all of it is finite."""
        rows, share, n, dtype = experts.numel(), experts.shape[1], self._n, self.dtype
        y = empty((rows, n), dtype)
        # By position, in the order of the structs' fields.
        of_call = struct_of(self.call).pack(
            *(address(experts, torch.int64), rows, self._count, share, ctypes.addressof(self._variants), self._steps),
            *(address(x), compiled_library.TYPES[x.dtype], x.stride(0), x.shape[0]),
            *(address(y), compiled_library.TYPES[dtype], n, 0),
            *numerics,
            compiled_library.threads(),
        )
        return y, not self._call(self._weight + of_call)

    def grouped(self, x: Tensor, weight: Any, experts: Tensor) -> Tensor | None:
        """The product with the weight that this was made from; None if one compiled call cannot do it."""
        if (
            x.dtype is not self.dtype
            or experts.dim() != 2
            or x.shape != (experts.shape[0], self._row)
            or experts.dtype is not torch.int64
            or not (x.is_cpu and experts.is_cpu and x.is_contiguous() and experts.is_contiguous())
            or not self.is_of(*self.tensors_of(weight))
        ):
            return None
        rows = experts.numel()
        if not (rows and self.is_fastest(rows)):
            return None
        y, finite = self.run(x, experts, self.numerics)
        return y if finite else None

    @classmethod
    def prepare(cls, weight: Any) -> None:
        """Let the next product with this weight call `grouped` of what the last one made at once."""
        made = cls.made_of(weight.qdata)
        if made is not None and made.compiled is not None and made.dtype is weight.scheme.dtype:
            vars(weight)["fast_grouped"] = made.grouped


class FloatExperts(CompiledExperts):
    """For an input in floating point."""

    name, call = "experts_mm", ExpertsCall


class IntExperts(CompiledExperts):
    """For int8 activations."""

    name, call = "experts_int8_mm", ExpertsIntCall


def _is_stack(codes: Tensor) -> bool:
    """Whether the rows of all experts are evenly spaced in memory."""
    return codes.stride(2) == 1 and codes.stride(0) == codes.shape[1] * codes.stride(1)


@opaque(lambda x, experts, codes, *_: x.new_empty(experts.shape[0] * experts.shape[1], codes.shape[1]))
def cpu_experts_mm(
    x: Tensor, experts: Tensor, codes: Tensor,
    scale: Tensor, zero_point: Tensor | None, packed: bool, dtype: Name, low: float, high: float, domain: Name,
    table: Tensor | None = None, scale_dtype: Name = "", scale_group: int = 0, scale_is_positive: bool = False,
    scale_scale: Tensor | None = None, scale_mean: Tensor | None = None, zero_point_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The equation above, (T * R, N) in the dtype of x.

    Args:
        x: (T, K) fp32, bf16 or fp16.
        experts: (T, R) int64; an index that names no expert gives a row of zeros.
        codes: (E, N, K) in the storage dtype of `dtype`, the name of a `QDType`; or packed along K.
        scale, zero_point: (E, N, G), G groups of a row, or (1, 1, 1).
        low, high, domain: see `cpu_weight_only_mm`.
        table: of a look-up table, (L,) or (E, N, G, L); then `domain` is `TABLE`.
        scale_scale: if given, `scale` and `zero_point` are codes, and the last six the fields of `QuantizedScales`.
    """
    x, experts, scale = _checked(x, experts, codes, scale)
    scales = None
    if scale_scale is not None:
        of_scales = scale_dtype, scale_group, scale_is_positive, scale_scale, scale_mean, zero_point_scale
        scales = code_values.QuantizedScales(*of_scales)
    (count, n), k, rows = codes.shape[:2], x.shape[1], experts.numel()
    if not (rows and n and k):
        return x.new_zeros(rows, n)
    layer = None
    if _is_stack(codes):
        about = (count * n, k, dtype, packed, domain, (low + high + 1) / 2, count, x.dtype, x.dtype, ())
        layer = FloatExperts.of(codes, scale, zero_point if table is None else table, *about, scales=scales)

    def one_by_one() -> Tensor:
        dense, zeros = (scale, zero_point) if scales is None else scales.numbers(scale, zero_point)

        def product(of_input: Tensor, e: int) -> Tensor:
            of_expert = x[of_input], codes[e], n, dense[e % len(dense)]
            if table is not None:
                own = table if table.dim() == 1 else table[e]
                return weight_only.cpu_lut_mm(*of_expert, own, qdtype(dtype).bits, packed, None)
            zero = None if zeros is None else zeros[e % len(zeros)]
            return cpu_weight_only_mm(*of_expert, zero, packed, dtype, low, high, domain, None)

        return expert_by_expert(x, experts, count, n, product)

    if layer is None or not layer.is_fastest(rows):
        return one_by_one()
    return _together("cpu_experts_mm", layer, x, experts, (), one_by_one)


def _together(
    name: str, layer: CompiledExperts, x: Tensor, experts: Tensor, numerics: Numerics, one_by_one: Callable[[], Tensor]
) -> Tensor:
    """The products in one call; `one_by_one` gives rows that are not finite in it."""
    assert layer.compiled is not None
    if recording():
        note(f"{name}.{layer.compiled.instruction_set}")
    y, finite = layer.run(x, experts, numerics)
    return y if finite else where_finite(y, x, one_by_one, experts.shape[1])


@opaque(lambda x, experts, *rest: x.new_empty(experts.numel(), rest[8].shape[1], dtype=rest[-1]))
def cpu_experts_int8_mm(
    x: Tensor, experts: Tensor, xs: Tensor | None, xz: Tensor | None,
    low: float, high: float, asymmetric: float, given: float, smallest: float, largest: float,
    codes: Tensor, ws: Tensor, wz: Tensor | None, packed: bool, weight_dtype: Name, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The equation above with both operands in codes, (T * R, N), and the exact results of `cpu_int8_mm`, whose
    arguments x (T, K), xs, xz, low to largest, weight_dtype and dtype are; the others are those of `cpu_experts_mm`."""
    x, experts, ws = _checked(x, experts, codes, ws)
    (m, k), (count, n), rows = x.shape, codes.shape[:2], experts.numel()
    if not (rows and n and k):
        return x.new_zeros(rows, n, dtype=dtype)
    layer, quantizer = None, (low, high, asymmetric, given, smallest, largest)
    numerics = numerics_of(quantizer)
    if _is_stack(codes):
        about = (count * n, k, weight_dtype, packed, "INT", 0.0, count, dtype, "int8", numerics)
        layer = IntExperts.of(codes, ws, wz, *about)

    def one_by_one() -> Tensor:
        xq, factor, zero_point = (x, xs, xz) if x.dtype is torch.int8 else quantize_rows(x, quantizer, xs, xz)
        assert factor is not None
        of_x = xq, *of_rows(factor, zero_point, m)

        def product(of_input: Tensor, e: int) -> Tensor:
            rows, scale, zero = (None if t is None else t[of_input] for t in of_x)
            of_weight = codes[e], n, ws[e % len(ws)], None if wz is None else wz[e % len(wz)]
            assert rows is not None
            return cpu_int8_mm(rows, scale, zero, *NO_QUANTIZER, *of_weight, packed, weight_dtype, dtype, None)

        return expert_by_expert(x.new_empty(0, dtype=dtype), experts, count, n, product)

    if layer is None or not layer.is_fastest(rows):
        return one_by_one()
    if xs is not None:
        of_x = of_rows(xs, xz, m)
        numerics = numerics_of(quantizer, address(of_x[0], torch.float32), address(of_x[1], torch.int32))
    return _together("cpu_experts_int8_mm", layer, x, experts, numerics, one_by_one)


def _checked(x: Tensor, experts: Tensor, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, the index and the scales, as the compiled functions read them; a `ValueError` for other shapes, dtypes,
    devices."""
    axes = x.dim(), experts.dim(), codes.dim(), scale.dim()
    is_index = experts.dtype is torch.int64 and experts.shape[:1] == x.shape[:1]
    if axes != (2, 2, 3, 3) or not is_index or not (x.is_cpu and experts.is_cpu):
        raise ValueError(
            f"experts take rows (T, K) and an int64 index (T, R) on the CPU, and codes and scales of three axes; got "
            f"{tuple(x.shape)} on {x.device}, {tuple(experts.shape)} of {experts.dtype} on {experts.device}, "
            f"codes {tuple(codes.shape)} and scales {tuple(scale.shape)}"
        )
    return x if x.stride(1) == 1 else x.contiguous(), experts.contiguous(), scale.contiguous()


def _supports(problem: Problem) -> str | None:
    scheme, activation = problem.scheme, problem.scheme.activation
    if len(scheme.shape) != 3:
        return f"takes experts (E, N, K), the weight has shape {scheme.shape}"
    if reason := needs_rows(problem):
        return reason
    if 0 in scheme.shape:
        return f"takes experts with elements, the weight has shape {scheme.shape}"
    block = scheme.weight.block_size(scheme.shape)
    if block[:2] != (1, 1) and block != scheme.shape:
        return f"takes scales per row, group of a row or tensor, the weight has {scheme.weight.granularity}"
    matrix = scheme_of_expert(scheme)
    assert matrix is not None
    of_expert = problem._replace(op="linear", scheme=matrix)
    if activation is None:
        return weight_only.supports(of_expert)
    if not scheme.spec.static and activation.granularity.pattern(2)[0] != 1:
        return f"takes activations whose rows are quantized by themselves, the scheme has {activation.granularity}"
    return int8_linear.supports(of_expert)


@register_compiled(
    "grouped_linear", weight=(*INTEGERS, *code_values.FLOATS), activation=(), supports=_supports, checks_memory=True,
    advice=variants.advice, name="cpu_experts_mm",
)  # fmt: skip
@register_compiled(
    "grouped_linear", spec=CodebookSpec, weight=None, activation=(), supports=_supports, checks_memory=True,
    advice=variants.advice, name="cpu_experts_lut_mm",
)  # fmt: skip
def _grouped_linear(x: Tensor, quantized: Any, experts: Tensor) -> Tensor:
    scales, form = code_values.QuantizedScales.of(quantized) or (), weight.form(quantized.scheme)
    zero_point, table = (getattr(quantized, name, None) for name in ("zero_point", "table"))
    y = cpu_experts_mm(x, experts, quantized.qdata, quantized.scale, zero_point, *form, table, *scales)
    if not is_compiling():
        FloatExperts.prepare(quantized)
    return y


@register_compiled(
    "grouped_linear", activation=("int8",), supports=_supports, checks_memory=True, advice=variants.advice,
    name="cpu_experts_int8_mm",
)  # fmt: skip
def _grouped_linear_int8(x: Tensor, quantized: Any, experts: Tensor) -> Tensor:
    scheme = quantized.scheme
    packed = scheme.layout.packed_axis is not None
    rows, xs, xz, quantizer = int8_linear.activation_of(x, quantized)
    ws, wz, kind = quantized.dense_scale(), quantized.zero_point, scheme.weight.dtype.name
    y = cpu_experts_int8_mm(rows, experts, xs, xz, *quantizer, quantized.qdata, ws, wz, packed, kind, x.dtype)
    if not is_compiling() and any(quantizer) and not scheme.spec.static:
        IntExperts.prepare(quantized)
    return y
