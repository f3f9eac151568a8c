"""Linear with a weight in the semi-sparse layout: 2:4 codes in int8 or float8.

    y[m, n] = sum_k x[m, k] * dequantize(w)[n, k] + bias[n],   x quantized or not

On CUDA, `torch._cslt_sparse_mm` multiplies quantized activations on the sparse tensor cores, which skip the zeros.
Everywhere else a slice of the weight is unpacked and multiplied at a time, as for the packed layout: with int8
activations that gives the same bits. There sparsity saves memory only, and unpacking costs time.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...primitives import ZeroPointDomain, qdtype
from ...primitives.layouts.semi_sparse import decompress_cusparselt, unpack_2_4
from ..custom_ops import Name, opaque
from ..ops import int8_grouped_mm, int_matmul, quantize, weight_only_mm
from ..registry import from_rows, needs_matrix, register, to_rows
from .scaled import EMULATED, multiply_int8_slices, supports_rows


def _wide(xq: Tensor) -> torch.dtype:
    """The dtype that products of such codes are accumulated in."""
    return torch.float32 if xq.is_floating_point() else torch.int32


@opaque(lambda xq, qdata, n: xq.new_empty(xq.shape[0], n, dtype=_wide(xq)))
def cusparselt_mm(xq: Tensor, qdata: Tensor, n: int) -> Tensor:
    """Codes (M, K) times the compressed weight (N, K), on CUDA: (M, N), int32 and exact from int8, fp32 from float8.
    cuSPARSELt takes multiples of 32 of N and K (the weight has them) and of 16 of M: pad with zeros."""
    m, k = xq.shape
    columns, rows = qdata.shape[1] // 5 * 8, max(16, m + -m % 16)
    x = xq.new_zeros(rows, columns)
    x[:m, :k] = xq
    return torch._cslt_sparse_mm(qdata, x.t(), out_dtype=_wide(xq))[:n, :m].t().contiguous()


@opaque(lambda xq, xs, xz, qdata, ws, dtype: xs.new_empty(xq.shape[0], ws.shape[0], dtype=dtype))
def semi_sparse_int8_mm(
    xq: Tensor, xs: Tensor, xz: Tensor | None, qdata: Tensor, ws: Tensor, dtype: torch.dtype
) -> Tensor:
    """See `int8_grouped_mm`; `qdata` holds the (N, K) codes, sparse along rows."""
    n, k = ws.shape[0], xq.shape[1]
    return multiply_int8_slices(xq, xs, xz, _reader(qdata, n, k, torch.int8), ws, None, dtype)


def _reader(qdata: Tensor, n: int, k: int, dtype: torch.dtype) -> Callable[[int, int], Tensor]:
    """What reads a slice of rows of the codes (n, k) in `dtype`."""
    if not _is_compressed(qdata):
        return lambda start, stop: unpack_2_4(qdata[start:stop], k, dtype)
    codes = decompress_cusparselt(qdata, n, k)
    return lambda start, stop: codes[start:stop]


@opaque(lambda x, qdata, n, *_: x.new_empty(x.shape[0], n))
def semi_sparse_weight_mm(x: Tensor, qdata: Tensor, n: int, axis: int, scale: Tensor, dtype: Name) -> Tensor:
    """The equation above without bias, for an input that is not quantized: (M, N) in the dtype of x, in which the
    product runs.

    Args:
        qdata: the (N, K) codes, sparse along `axis`, -1 or -2.
        scale: one element per block of the weight; the blocks follow from its shape.
        dtype: name of the `QDType` of the codes.
    """
    kind, k = qdtype(dtype), x.shape[1]
    numerics = weight_only_mm.CodeNumerics(scale, None, kind, kind.quant_min, kind.quant_max, ZeroPointDomain.NONE)
    read = _reader(qdata, n, k, kind.storage) if axis == -1 else _reader(qdata.t(), k, n, kind.storage)
    return weight_only_mm.multiply_codes(x, (n, k), read, numerics, axis)


def _is_compressed(qdata: Tensor) -> bool:
    """Whether it is compressed by cuSPARSELt, and so has the dtype of the codes."""
    return qdata.dtype != torch.uint8


def _per_row(scale: Tensor, rows: int) -> bool:
    """Whether there is one scale per row or one in all, which factors out of the sum over k."""
    return scale.shape[1] == 1 and scale.shape[0] in (1, rows)


NOTE = "on CPU it saves memory and costs time: codes are unpacked on each call"
_register = functools.partial(register, "linear", layout="semi_sparse", supports=needs_matrix)


@_register(weight=("int8",), activation=("int8",), priority=20, supports=supports_rows, note=NOTE)
def semi_sparse_int8_scaled_mm(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation, then the equation of `int8_scaled_mm`."""
    xq, xs, xz = quantize.quantize_input(to_rows(x), weight)
    qdata, ws = weight.qdata, weight.dense_scale()
    if _is_compressed(qdata) and ws.shape[1] == 1 and xz is None and xq.shape[1] <= int_matmul.int32_terms():
        ws, up = int8_grouped_mm.without_large(ws)
        y = (cusparselt_mm(xq, qdata, ws.shape[0]).float() * ws.t() * xs * up).to(x.dtype)
    else:
        y = semi_sparse_int8_mm(xq, xs, xz, qdata, ws, x.dtype)
    return from_rows(y, x, bias)


@_register(activation=("float8_e4m3fn",), device="cuda", priority=20)
@_register(activation=("float8_e4m3fn",), priority=10, note=EMULATED, emulates=True, name="emulated_semi_sparse_mm")
def semi_sparse_float8_scaled_mm(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation, multiply the codes, then the scales in fp32."""
    scheme, qdata, ws = weight.scheme, weight.qdata, weight.dense_scale()
    xq, xs, xz = quantize.quantize_input(to_rows(x), weight)
    n = scheme.shape[0]
    if qdata.dtype == xq.dtype and _per_row(ws, n) and _per_row(xs, xq.shape[0]) and xz is None:
        y = cusparselt_mm(xq, qdata, n) * ws.float().t() * xs.float()
    else:
        x32 = quantize.dequantize_rows(scheme.activation, xq, xs, xz)
        y = semi_sparse_weight_mm(x32, qdata, n, scheme.layout.packed_axis, ws, scheme.weight.dtype.name)
    return from_rows(y.to(x.dtype), x, bias)


@_register(activation=(), priority=10, note="unpacks and dequantizes on each call: it saves memory and costs time")
def semi_sparse_weight_only_mm(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with an input in floating point."""
    scheme, ws = weight.scheme, weight.dense_scale()
    axis, name = scheme.layout.packed_axis, scheme.weight.dtype.name
    return from_rows(semi_sparse_weight_mm(to_rows(x), weight.qdata, scheme.shape[0], axis, ws, name), x, bias)
