"""`weight_only_mm` for a weight in the packed layout: a slice is unpacked, dequantized and multiplied at a time.

    y[m, n] = sum_k x[m, k] * dequantize(unpack(w))[n, k] + bias[n]

A transposed weight, packed along n, is cut along k instead, and the products of the slices are added up in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...layouts.packed import RowsInSlices, unpack_codes
from ...primitives.granularity import block_of
from ...primitives.qdtype import QDType, qdtype
from ..custom_ops import opaque
from ..ops.weight_only_mm import SliceMemory, dequantize_slice, multiply_slices, slice_length
from ..registry import needs_matrix, register
from ..rows import from_rows, to_rows


@opaque(lambda x, qdata, n, *_: x.new_empty(x.shape[0], n))
def packed_weight_mm(
    x: Tensor,
    qdata: Tensor,
    n: int,
    axis: int,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: str,
    low: float,
    high: float,
    domain: str,
) -> Tensor:
    """The equation above without bias.

    Args:
        x: (M, K) floating point; the product runs in its dtype.
        qdata: uint8, the (N, K) codes packed along `axis`, -1 or -2.
        n: N.
        scale, zero_point, dtype, low, high, domain: see `weight_only_mm`.

    Returns:
        (M, N) in the dtype of x.
    """
    kind, k = qdtype(dtype), x.shape[1]
    if axis == -1:
        return multiply_slices(x, (n, k), RowsInSlices(qdata, kind, k), scale, zero_point, kind, low, high, domain)
    # This matrix is a view of one of shape (K, N), whose rows are contiguous in memory: work on that.
    columns = lambda a, b: unpack_codes(qdata.t()[a:b], kind, n)  # noqa: E731
    return multiply_transposed_slices(x, n, columns, scale, zero_point, kind, low, high, domain)


def multiply_transposed_slices(
    x: Tensor,
    n: int,
    columns: Callable[[int, int], Tensor],
    scale: Tensor,
    zero_point: Tensor | None,
    kind: QDType,
    low: float,
    high: float,
    domain: str,
) -> Tensor:
    """`weight_only_mm.multiply_slices` for a weight (N, K) whose codes are read by ``columns(start, stop)``, those of
    the transposed matrix, (stop - start, N); products in the dtype of x, their sums in fp32."""
    k = x.shape[1]
    block = block_of((n, k), scale.shape)[::-1]
    y = x.new_zeros(x.shape[0], n, dtype=torch.float32)
    step = slice_length(x, n, block[0])
    scale, zero_point = scale.t(), None if zero_point is None else zero_point.t()
    memory = SliceMemory(x, min(k, step), n)
    for start in range(0, k, step):
        part = columns(start, start + step)
        stop = start + step
        weight = dequantize_slice(part, start, stop, block, scale, zero_point, kind, low, high, domain, x.dtype, memory)
        y += torch.mm(x[:, start : start + step], weight)
    return y.to(x.dtype)


@register(
    "linear",
    layout="packed",
    activation=(),
    priority=10,
    supports=needs_matrix,
    note="dequantizes on each call: on CPU it saves memory, not time",
    name="packed_weight_mm",
)
def packed_weight_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with any weight-only scheme in the packed layout."""
    spec = weight.scheme.weight
    low, high = spec.code_range
    n = weight.scheme.shape[0]
    axis = weight.scheme.layout.packed_axis
    numerics = (spec.dtype.name, float(low), float(high), spec.zero_point_domain.name)
    y = packed_weight_mm(to_rows(x), weight.qdata, n, axis, weight.dense_scale(), weight.dense_zero_point(), *numerics)
    return from_rows(y, x, bias)
