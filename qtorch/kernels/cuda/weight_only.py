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
from .. import custom_ops, features, registry
from ..cpu import code_values
from ..linear import codebooks
from ..linear.scaled import INTEGERS
from ..registry import Problem, from_rows, needs_clear_width, needs_floats, needs_matrix, needs_rows, register, to_rows


@custom_ops.opaque(lambda x, qdata, *_: x.new_empty(x.shape[0], qdata.shape[0]))
def cuda_weight_mm(
    x: Tensor, qdata: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: str, middle: float, domain: str,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The equation above.

    Args:
        x: (M, K) fp32, fp16 or bf16.
        qdata: (N, K) codes of `dtype`, a `QDType` name; or uint8, those codes packed by row.
        scale: (N, groups) or (1, groups), groups dividing K.  zero_point: like it, or None.
        middle: of the code range, (low + high + 1) / 2; used in the FLOAT domain.
        domain: name of a `ZeroPointDomain`.
        bias: (N,), added to the rounded result; or None.

    Returns:
        (M, N) in the dtype of x.
    """
    from .triton.intx_weight_mm import intx_weight_mm

    return intx_weight_mm(x, qdata, scale, zero_point, dtype, middle, domain, bias)


def weight_arguments(weight: Any) -> tuple[Tensor, Tensor, Tensor | None, str, float, str]:
    """Codes, scale, zero point and numerics of a weight, as `cuda_weight_mm` takes them."""
    spec = weight.scheme.weight
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


@reads_integers("linear", activation=(), supports=_supports, name="cuda_weight_mm")
def cuda_weight_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with any weight-only integer scheme."""
    fused, bias = registry.split_bias(bias, x, weight.scheme.shape[0])
    y = cuda_weight_mm(to_rows(x), *weight_arguments(weight), fused)
    return from_rows(y, x, bias)


@functools.lru_cache(maxsize=256)
def _numbers(name: str, size: int, device: torch.device) -> Tensor:
    """The numbers of codes 0, 1, ... in fp32, and zeros up to `size` of them; the name is as in `_name_of`."""
    if name in code_values.FLOATS:
        numbers = code_values.CodeValues.of_type(name).table[0, :size].to(device)
    else:
        numbers = torch.tensor([float(number) for number in name.split()], dtype=torch.float32, device=device)
    return torch.nn.functional.pad(numbers, (0, size - len(numbers)))


def _name_of(spec: QuantSpec | CodebookSpec) -> str:
    """What the codes stand for: the name of a type, or the numbers of a table."""
    return " ".join(map(repr, spec.table or ())) if isinstance(spec, CodebookSpec) else spec.dtype.name


def _stored_in(scheme: Scheme) -> str:
    """The type of the stored elements, as integers."""
    return "uint8" if scheme.layout.packed_axis is None else f"uint{scheme.weight.dtype.bits}"


_name_of._dynamo_marked_constant = _stored_in._dynamo_marked_constant = True  # type: ignore[attr-defined]


@custom_ops.opaque(lambda x, qdata, *_: x.new_empty(x.shape[0], qdata.shape[0]))
def cuda_number_mm(
    x: Tensor, qdata: Tensor, scale: Tensor, dtype: str, numbers: str, bias: Tensor | None, table: Tensor | None = None
) -> Tensor:
    """`cuda_weight_mm` of elements in `dtype`, a type of integers, that stand for the `numbers` of `_name_of`; or for
    those of a table for each group, (N or 1, groups, 2^bits)."""
    from .triton.intx_weight_mm import intx_weight_mm

    scale = scale.float() if scale.element_size() == 1 else scale
    table = _numbers(numbers, 2 ** qdtype(dtype).bits, x.device) if table is None else table.contiguous()
    return intx_weight_mm(x, qdata.view(torch.uint8), scale, table, dtype, 0.0, code_values.TABLE, bias)


def _supports_numbers(problem: Problem) -> str | None:
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
    return _supports(problem)


@register(
    "linear", layout=("plain", "packed"), spec=None, activation=(), device="cuda", priority=30,
    supports=_supports_numbers, name="cuda_number_mm",
)  # fmt: skip
def linear_of_numbers(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with small floats, or look-up tables."""
    scheme = weight.scheme
    fused, bias = registry.split_bias(bias, x, scheme.shape[0])
    name, own = _name_of(scheme.weight), isinstance(scheme.weight, CodebookSpec) and scheme.weight.table is None
    codes = weight.qdata, weight.dense_scale(), _stored_in(scheme), name, fused, weight.table if own else None
    return from_rows(cuda_number_mm(to_rows(x), *codes), x, bias)


@custom_ops.opaque(lambda x, codes, scale, rotation, bias: x.new_empty(x.shape[0], codes.shape[0]))
def cuda_vector_codebook_mm(x: Tensor, codes: Tensor, scale: Tensor, rotation: int, bias: Tensor | None) -> Tensor:
    """`vector_codebook_mm` of linear/codebooks.py, plus bias (N), in the dtype of x, or None."""
    from .triton.vector_codebook_mm import vector_codebook_mm

    return vector_codebook_mm(codebooks.rotated_input(x, rotation), codes, scale, bias)


def _supports_vectors(problem: Problem) -> str | None:
    return features.cuda_lacks("triton") or codebooks.supports(problem) or needs_floats(problem)


@register(
    "linear",
    layout=codebooks.LAYOUT,
    activation=(),
    device="cuda",
    priority=30,
    supports=_supports_vectors,
    rotated=True,
    name="cuda_vector_codebook_mm",
)
def _vector_codebook_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    fused, bias = registry.split_bias(bias, x, weight.scheme.shape[0])
    y = cuda_vector_codebook_mm(to_rows(x), weight.qdata, weight.scale, codebooks.rotation_of(weight), fused)
    return from_rows(y, x, bias)
