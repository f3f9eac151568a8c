"""Products with the transpose of a quantized weight (N, K), as gradients of inputs are:

    y[m, k] = sum_n x[m, n] * dequantize(w)[n, k]

C++ dequantizes a slice of rows of the weight into the cache, torch multiplies it, and products are added up in fp32.
"""

from typing import Any

from torch import Tensor

from ...primitives import CodebookSpec, qdtype
from ..custom_ops import Name, note, opaque
from ..linear import scaled
from ..linear.codebooks import lut_weight_mm
from ..linear.weight_only import packed_weight_mm
from ..ops.weight_only_mm import multiply_slices, slice_length, weight_only_mm
from ..registry import Problem, from_rows, needs_floats, needs_matrix, to_rows
from . import code_values, compiled_library, weight
from .memory import empty
from .weight_only import SLICE_BYTES, Dequantized


@opaque(lambda x, codes, k, *_: x.new_empty(x.shape[0], k))
def cpu_transposed_mm(
    x: Tensor, codes: Tensor, k: int, scale: Tensor, zero_point: Tensor | None, table: Tensor | None,
    packed: bool, dtype: Name, low: float, high: float, domain: Name,
) -> Tensor:  # fmt: skip
    """The equation above, (M, K) in the dtype of x.

    Args:
        x: (M, N) fp32, bf16 or fp16.
        codes: the transpose of those of the weight: (K, N), or packed along K.
        scale, zero_point: (G, N), G groups of a row of the weight.
        table: of a look-up table (L,), or (G, N, L); then `domain` is `TABLE`.
        packed, dtype, low, high, domain: see `cpu_weight_only_mm`.
    """
    n = x.shape[1]
    rows = codes.t()
    factors = scale.t().contiguous(), None if zero_point is None else zero_point.t().contiguous()
    own_table = table if table is None or table.dim() == 1 else table.transpose(0, 1)
    about = (n, k, dtype, packed, domain, (low + high + 1) / 2)
    made = weight.CompiledWeight(rows, factors[0], factors[1] if table is None else own_table, *about)
    if made.compiled is None or made.fields is None:
        note("cpu_transposed_mm.torch")
        if table is not None:
            return lut_weight_mm(x, codes, scale, table, qdtype(dtype).bits if packed else 8, 0 if packed else 1, k)
        if packed:
            return packed_weight_mm(x, codes, k, -2, scale, zero_point, dtype, low, high, domain)
        return weight_only_mm(x, codes, scale, zero_point, dtype, low, high, domain)
    note(f"cpu_transposed_mm.{made.compiled.instruction_set}")
    numbers = Dequantized(made.compiled, made.fields, n, k, x.dtype)
    step = min(n, slice_length(x, k, limit=SLICE_BYTES))
    memory = empty((step, k), x.dtype)
    return multiply_slices(x, k, step, lambda a, b: numbers.rows(a, b, memory[: b - a]), -2)


def _supports(problem: Problem) -> str | None:
    scheme = problem.scheme
    if reason := needs_floats(problem) or needs_matrix(problem):
        return reason
    (k, n), (groups, columns) = scheme.shape, scheme.weight.scale_shape(scheme.shape)
    axis = scheme.layout.packed_axis
    of_rows = axis is None and (groups == k or groups == n == 1)
    if axis == -1 or not k or not n or columns != n or k % groups or of_rows:
        return "takes the transpose of a weight with scales per row or group of a row"
    return compiled_library.missing()


@weight.register_compiled(
    "linear", weight=(*scaled.INTEGERS, *code_values.FLOATS), activation=(), supports=_supports, checks_memory=True,
    note="gradients of the input", name="cpu_transposed_mm",
)  # fmt: skip
@weight.register_compiled(
    "linear", spec=CodebookSpec, weight=None, activation=(), supports=_supports, checks_memory=True,
    note="gradients of the input", name="cpu_transposed_lut_mm",
)  # fmt: skip
def _linear(x: Tensor, quantized: Any, bias: Tensor | None) -> Tensor:
    scheme = quantized.scheme
    has_table = isinstance(scheme.weight, CodebookSpec)
    others = (None, quantized.table) if has_table else (quantized.dense_zero_point(), None)
    factors = quantized.dense_scale(), *others, *weight.form(scheme)
    return from_rows(cpu_transposed_mm(to_rows(x), quantized.qdata, scheme.shape[0], *factors), x, bias)
