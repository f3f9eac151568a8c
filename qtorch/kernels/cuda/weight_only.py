"""Weight-only linear on CUDA, by Triton: integers, small floats and tables of 1 to 8 bits, and vectors in bytes.

    y[m, n] = sum_k x[m, k] * dequantize(w)[n, k] + bias[n]

Codes are read as the layout stores them; `intx_weight_mm.py` and `vector_codebook_mm.py` in `triton/` have the variants
of the computation.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ...primitives import CodebookSpec, QuantSpec, Scheme, qdtype
from .. import features, registry
from ..cpu import code_values
from ..custom_ops import Name, opaque
from ..linear import codebooks
from ..linear.scaled import INTEGERS
from ..registry import Problem, from_rows, needs_clear_width, needs_floats, needs_matrix, needs_rows, register, to_rows


@opaque(lambda x, qdata, *_: x.new_empty(x.shape[0], qdata.shape[0]))
def cuda_weight_mm(
    x: Tensor, qdata: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: Name, middle: float, domain: Name,
    bias: Tensor | None, numbers: str = "",
) -> Tensor:  # fmt: skip
    """The equation above.

    Args:
        x: (M, K) fp32, fp16 or bf16.
        qdata: (N, K) codes of `dtype`, a `QDType` name; or uint8, those codes packed by row.
        scale: (N, groups) or (1, groups), groups dividing K.  zero_point: like it, or None.
        middle: of the code range, (low + high + 1) / 2; used in the FLOAT domain.
        domain: name of a `ZeroPointDomain`; or `TABLE`: codes of `dtype`, a type of integers, stand for numbers that
            `name_of_numbers` names; or for those of tables of groups (N or 1, groups, 2^bits) in place of zero points.
        bias: (N,), added to the rounded result; or None.

    Returns:
        (M, N) in the dtype of x.
    """
    from .triton.intx_weight_mm import intx_weight_mm

    tensors = operands(qdata, scale, zero_point, dtype, domain, numbers)
    return intx_weight_mm(x, *tensors, dtype, middle, domain, bias)


def operands(
    qdata: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: str, domain: str, numbers: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scale, and zero point or table, as Triton's kernels take them."""
    if domain != code_values.TABLE:
        return qdata, scale, zero_point
    table = _numbers(numbers, 2 ** qdtype(dtype).bits, qdata.device) if zero_point is None else zero_point.contiguous()
    return qdata.view(torch.uint8), scale.float() if scale.element_size() == 1 else scale, table


def weight_arguments(weight: Any) -> tuple[Tensor, Tensor, Tensor | None, str, float, str]:
    """Codes, scale, zero point and numerics of a weight, as `cuda_weight_mm` takes them."""
    spec = weight.scheme.weight
    if name_of_numbers(spec):
        own = weight.table if isinstance(spec, CodebookSpec) and spec.table is None else None
        return weight.qdata, weight.dense_scale(), own, _stored_in(weight.scheme), 0.0, code_values.TABLE
    low, high = spec.code_range
    numerics = (spec.dtype.name, (low + high + 1) / 2, spec.zero_point_domain.name)
    return weight.qdata, weight.dense_scale(), weight.dense_zero_point(), *numerics


def _supports(problem: Problem) -> str | None:
    scheme = problem.scheme
    if reason := features.cuda_lacks("triton") or needs_matrix(problem) or needs_rows(problem) or needs_floats(problem):
        return reason
    if reason := needs_clear_width(problem):
        return reason
    if scheme.weight.block_size(scheme.shape)[0] not in (1, scheme.shape[0]):
        return f"takes a scale of its own for each output channel, or one for all, got {scheme.weight.granularity}"
    return None


reads_integers = functools.partial(register, layout=("plain", "packed"), weight=INTEGERS, device="cuda", priority=30)
"""`register` of kernels by Triton for integer weights, packed or not."""


@functools.lru_cache(maxsize=256)
def _numbers(name: str, size: int, device: torch.device) -> Tensor:
    """The numbers of codes 0, 1, ... in fp32, and zeros up to `size` of them; the name is as in `name_of_numbers`."""
    if name in code_values.FLOATS:
        numbers = code_values.CodeValues.of_type(name).table[0, :size].to(device)
    else:
        numbers = torch.tensor([float(number) for number in name.split()], dtype=torch.float32, device=device)
    return torch.nn.functional.pad(numbers, (0, size - len(numbers)))


def name_of_numbers(spec: QuantSpec | CodebookSpec) -> str:
    """What codes that are no integers stand for: the name of a type, or the numbers of a table; "" for integers."""
    if isinstance(spec, CodebookSpec):
        return " ".join(map(repr, spec.table)) if spec.table else "tables of blocks"
    return spec.dtype.name if spec.dtype.is_floating_point else ""


def _stored_in(scheme: Scheme) -> str:
    """The type of the stored elements, as integers."""
    return "uint8" if scheme.layout.packed_axis is None else f"uint{scheme.weight.dtype.bits}"


name_of_numbers._dynamo_marked_constant = _stored_in._dynamo_marked_constant = True  # type: ignore[attr-defined]


def supports_numbers(problem: Problem) -> str | None:
    """Why the kernels take no codes that stand for such numbers, or None."""
    weight = problem.scheme.weight
    if isinstance(weight, CodebookSpec):
        numbers = weight.table or (1.0,)  # the largest of tables of blocks
    elif weight.dtype.name in code_values.FLOATS and not weight.has_zero_point:
        numbers = weight.code_range
    else:
        return "takes small floats without zero points, or tables"
    largest = max(map(abs, numbers))
    if problem.dtype is torch.float16 and largest > torch.finfo(torch.float16).max:
        return "has numbers that fp16 does not have, before they are scaled"
    return None


@register(
    "linear", layout=("plain", "packed"), spec=None, activation=(), device="cuda", priority=30,
    supports=lambda problem: supports_numbers(problem) or _supports(problem), name="cuda_number_mm",
)  # fmt: skip
@reads_integers("linear", activation=(), supports=_supports, name="cuda_weight_mm")
def cuda_weight_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with any weight-only scheme of integers, small floats or look-up tables."""
    fused, bias = registry.split_bias(bias, x, weight.scheme.shape[0])
    y = cuda_weight_mm(to_rows(x), *weight_arguments(weight), fused, name_of_numbers(weight.scheme.weight))
    return from_rows(y, x, bias)


@opaque(lambda x, codes, scale, rotation, bias: x.new_empty(x.shape[0], codes.shape[0]))
def cuda_vector_codebook_mm(x: Tensor, codes: Tensor, scale: Tensor, rotation: int, bias: Tensor | None) -> Tensor:
    """`vector_codebook_mm` of linear/codebooks.py, plus bias (N), in the dtype of x, or None."""
    from .triton.vector_codebook_mm import vector_codebook_mm

    return vector_codebook_mm(codebooks.rotated_input(x, rotation), codes, scale, bias)


@register(
    "linear", layout=codebooks.LAYOUT, activation=(), device="cuda", priority=30, rotated=True,
    supports=lambda problem: features.cuda_lacks("triton") or codebooks.supports(problem) or needs_floats(problem),
    name="cuda_vector_codebook_mm",
)  # fmt: skip
def _vector_codebook_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    fused, bias = registry.split_bias(bias, x, weight.scheme.shape[0])
    y = cuda_vector_codebook_mm(to_rows(x), weight.qdata, weight.scale, codebooks.rotation_of(weight), fused)
    return from_rows(y, x, bias)
