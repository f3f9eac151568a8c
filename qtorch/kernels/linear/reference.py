"""The reference: it defines the correct result for every scheme, layout and device, without regard to speed.

Weight-only: dequantize in fp32, multiply in fp32. With quantized activations: the integer sums of each block of K
exactly (in float64, which holds every int32), times the weight's scale and added up in fp32 in the order of the
blocks, times the activation's scale.

A NaN or an infinity in a row of the input gives NaN or infinities in all of that row's outputs, and changes no other
row: see `quantize_rowwise`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...primitives.granularity import block_of
from ..ops.int8_grouped_mm import without_large
from ..ops.quantize_rowwise import dequantize_rows, quantize_input
from ..registry import REFERENCE, QuantizedWeight, register


@register("linear", spec=None, priority=REFERENCE, rotated=True, name="reference")
def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x (..., K) times a weight (N, K), or (E, N, K) with x (E, M, K); plus bias (N)."""
    scheme = weight.scheme
    codes, scale, zero_point = weight.plain()
    spec = scheme.weight
    integers = scheme.activation is not None and not scheme.activation.dtype.is_floating_point
    integers = integers and not spec.dtype.is_floating_point and not spec.zero_point_domain.is_real
    if scheme.activation is not None:
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        # A block of activations may span rows; the last one is completed with zeros.
        missing = -count % max(scheme.activation.granularity.pattern(2)[0], 1)
        xq, xs, xz = quantize_input(functional.pad(rows, (0, 0, 0, missing)), weight)
        if integers and len(scheme.shape) == 2:
            y = _integer_product(xq, xs, xz, codes, scale, zero_point)[:count].reshape(*x.shape[:-1], codes.shape[0])
            return _finish(y, bias, x.dtype)
        x32 = dequantize_rows(scheme.activation, xq, xs, xz)[:count].reshape(x.shape)
    else:
        x32 = x.float()
    # The rotations of the weight and of the activation cancel.
    spec = spec if scheme.activation is None else spec.unrotated
    y = torch.matmul(x32, spec.dequantize(codes, scale, zero_point).transpose(-2, -1))
    return _finish(y, bias, x.dtype)


def _finish(y: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = y.to(dtype)
    return y if bias is None else y + bias


def _integer_product(xq: Tensor, xs: Tensor, xz: Tensor | None, wq: Tensor, ws: Tensor, wz: Tensor | None) -> Tensor:
    """fp32 (M, N) from codes (M, K) and (N, K); the blocks follow from the shapes of the scales."""
    rows, size = block_of(wq.shape, ws.shape)
    ws, up = without_large(ws.repeat_interleave(rows, 0))
    x_rows, x_size = block_of(xq.shape, xs.shape)
    xs = xs.float().repeat_interleave(x_rows, 0)
    x = xq.double() if xz is None else xq.double() - xz.double()
    w = wq.double()
    if wz is not None:
        w = w - wz.double().repeat_interleave(rows, 0).repeat_interleave(size, 1)
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float32, device=x.device)
    if xs.shape[1] == 1:
        for g in range(ws.shape[1]):
            part = x[:, g * size : (g + 1) * size] @ w[:, g * size : (g + 1) * size].t()
            total = total + part.float() * ws[:, g]
        return total * xs * up
    step = min(size, x_size)
    for k in range(0, x.shape[1], step):
        part = x[:, k : k + step] @ w[:, k : k + step].t()
        total = total + part.float() * ws[:, k // size] * xs[:, k // x_size, None]
    return total * up
