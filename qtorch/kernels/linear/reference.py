"""Linear by the reference, and with a weight in the portable layout: operators of torch, for `qtorch.export.portable`.

    y[m, n] = sum_k x[m, k] * dequantize(w)[n, k] + bias[n]                                     weight-only
    y[m, n] = (sum_g (sum_{k in g} (xq[m, k] - xz[m]) (wq[n, k] - wz[n, g])) * ws[n, g]) * xs[m] + bias[n]

The second has the bits of `int8_scaled_mm`: a sum of integers in int32, or in fp32 or fp64 where they hold it exactly
and an int32 might not. With ``PortableLayout(qdq=True)``, and with activations in floating-point codes, both operands
are dequantized and multiplied in fp32.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...primitives.granularity import block_of
from ..ops import int_matmul, quantize
from ..ops.block_mm import with_zeros
from ..ops.int8_grouped_mm import EXACT_TERMS, is_at_most, without_large
from ..ops.portable import NOTE, dequantized_weight, fake_quantized, quantize_portably
from ..registry import REFERENCE, Problem, QuantizedWeight, from_rows, needs_matrix, register, to_rows
from .scaled import INTEGERS, supports


@register("linear", spec=None, priority=REFERENCE, rotated=True, name="reference")
def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x (..., K) times a weight (N, K), or (E, N, K) with x (E, M, K); plus bias (N). The reference defines the correct
    result for every scheme, layout and device, without regard to speed. Weight-only: dequantize in fp32, multiply in
    fp32. With quantized activations: the integer sums of each block of K exactly (in float64, which holds every int32),
    times the weight's scale and added up in fp32 in the order of the blocks, times the activation's scale. A NaN or an
    infinity in a row of the input gives NaN or infinities in all of that row's outputs, and changes no other row."""
    spec, activation = weight.scheme.weight, weight.scheme.activation
    codes, scale, zero_point = weight.plain()
    if activation is None:
        return _finish(torch.matmul(x.float(), spec.dequantize(codes, scale, zero_point).mT), bias, x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    # A block of activations may span rows; the last one is completed with zeros.
    missing = -count % max(activation.granularity.pattern(2)[0], 1)
    xq, xs, xz = quantize.quantize_input(with_zeros(rows, 0, missing), weight)
    in_floats = activation.dtype.is_floating_point or spec.dtype.is_floating_point or spec.zero_point_domain.is_real
    if in_floats or len(weight.scheme.shape) > 2:
        x32 = quantize.dequantize_rows(activation, xq, xs, xz)[:count].reshape(x.shape)
        # The rotations of the weight and of the activation cancel.
        y = torch.matmul(x32, spec.unrotated.dequantize(codes, scale, zero_point).mT)
    else:
        y = _integer_product(xq, xs, xz, codes, scale, zero_point)[:count].reshape(*x.shape[:-1], codes.shape[0])
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


@register("linear", layout="portable", spec=None, priority=100, supports=needs_matrix, note=NOTE)
def portable_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with any scheme."""
    scheme = weight.scheme
    if scheme.activation is None:
        return functional.linear(x, dequantized_weight(weight, x.dtype), bias)
    if scheme.layout.qdq:
        return _in_float(fake_quantized(x, weight), x, weight, bias)
    if scheme.activation.dtype.is_floating_point:
        real = quantize.dequantize_rows(scheme.activation, *quantize_portably(to_rows(x), weight))
        return _in_float(real.reshape(x.shape), x, weight, bias)
    problem = Problem("linear", scheme, x.dtype, x.device.type)
    if scheme.activation.dtype.name != "int8" or scheme.weight.dtype.name not in INTEGERS or supports(problem):
        return linear(x, weight, bias)
    y = integer_product(*quantize_portably(to_rows(x), weight), *weight.plain())
    return from_rows(y.to(x.dtype), x, bias)


def _in_float(real: Tensor, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    values = dequantized_weight(weight, torch.float32)
    if x.dtype == torch.float32:
        return functional.linear(real, values, bias)
    return _finish(functional.linear(real, values), bias, x.dtype)


def integer_product(xq: Tensor, xs: Tensor, xz: Tensor | None, wq: Tensor, ws: Tensor, wz: Tensor | None) -> Tensor:
    """The second equation without bias, (M, N) in fp32, from codes (M, K) and (N, K)."""
    ws, up = without_large(ws)
    unsigned = wq.dtype == torch.uint8
    if ws.shape[1] == 1 and is_at_most(wq.shape[1], int_matmul.int32_terms(xz is not None, wz is not None or unsigned)):
        total = torch.mm(xq.int(), wq.int().t())
        if wz is not None:
            total = total - xq.sum(1, keepdim=True, dtype=torch.int32) * wz.int().t()
        if xz is not None:
            of_weight = wq.sum(1, dtype=torch.int32)
            of_weight = of_weight if wz is None else of_weight - wq.shape[1] * wz.int()[:, 0]
            total = total - xz.int() * of_weight
        return total.float() * ws.t() * xs.float() * up
    groups = ws.shape[1]
    exact = torch.float32 if wq.shape[1] <= EXACT_TERMS * groups else torch.float64
    x = xq.to(exact) if xz is None else xq.to(exact) - xz.to(exact)
    w = wq.to(exact).unflatten(1, (groups, -1))
    w = w if wz is None else w - wz.to(exact).unsqueeze(2)
    # (G, M, N): the sum of each group, times its scale.
    parts = torch.bmm(x.unflatten(1, (groups, -1)).transpose(0, 1), w.permute(1, 2, 0)).float()
    parts = parts * ws.t().unsqueeze(1)
    return functools.reduce(torch.add, parts.unbind(0)) * xs.float() * up
