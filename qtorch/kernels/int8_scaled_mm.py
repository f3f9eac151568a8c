"""Linear with quantized activations and weights, accumulated in integers.

    y[m, n] = (sum_g (sum_{k in g} (xq[m, k] - xz[m]) (wq[n, k] - wz[n, g])) * ws[n, g]) * xs[m] + bias[n]

The inner sum is an exact int32; the outer one, over the groups g of the weight (one, for a scale per row), runs in
fp32 in the order of the groups. So the result does not depend on the machine, and training with the same spec sees
the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .int_matmul import int_matmul
from .library import opaque
from .quantize_rowwise import quantize_activation
from .registry import Problem, QuantizedWeight, register

INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9))


def _fake(
    xq: Tensor, xs: Tensor, xz: Tensor | None, wq: Tensor, ws: Tensor, wz: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return xs.new_empty(xq.shape[0], wq.shape[0], dtype=dtype)


@opaque(
    "int8_grouped_mm(Tensor xq, Tensor xs, Tensor? xz, Tensor wq, Tensor ws, Tensor? wz, ScalarType dtype) -> Tensor",
    _fake,
)
def int8_grouped_mm(
    xq: Tensor, xs: Tensor, xz: Tensor | None, wq: Tensor, ws: Tensor, wz: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The equation above without bias.

    Args:
        xq: (M, K) int8 codes.  xs: (M, 1) or (1, 1) scale.  xz: zero point like xs, or None.
        wq: (N, K) int8 or uint8 codes.  ws: (N, G) scale, K divisible by G.  wz: (N, G) zero point, or None.
        dtype: of the result, (M, N).
    """
    groups = ws.shape[1]
    size = wq.shape[1] // groups
    # Unsigned codes of 8 bits do not fit int8: shift them with their zero point, which leaves the difference as it was.
    if wq.dtype == torch.uint8:
        wz = torch.zeros_like(ws, dtype=torch.int32) if wz is None else wz.to(torch.int32)
        wq, wz = (wq ^ 128).view(torch.int8), wz - 128
    total: Tensor | None = None
    for g in range(groups):
        x, w = xq[:, g * size : (g + 1) * size], wq[:, g * size : (g + 1) * size]
        part = int_matmul(x, w.t())
        if wz is not None:
            part -= x.sum(1, keepdim=True, dtype=torch.int32) * wz[:, g].to(torch.int32)
        if xz is not None:
            column_sums = w.sum(1, dtype=torch.int32)
            if wz is not None:
                column_sums = column_sums - size * wz[:, g].to(torch.int32)
            part -= xz.to(torch.int32) * column_sums
        scaled = part.float().mul_(ws[:, g].float())
        total = scaled if total is None else total.add_(scaled)
    assert total is not None
    return total.mul_(xs.float()).to(dtype)


def _supports(problem: Problem) -> str | None:
    scheme = problem.scheme
    activation = scheme.activation
    assert activation is not None
    if len(scheme.shape) != 2:
        return f"takes a 2-d weight, this one has shape {scheme.shape}"
    if scheme.weight.block_size(scheme.shape)[0] != 1:
        return f"takes a scale of its own for each output channel, the weight has {scheme.weight.granularity}"
    if activation.granularity.pattern(2) not in ((1, -1), (-1, -1)):
        return f"takes a scale per token or tensor for activations, the scheme has {activation.granularity}"
    for what, spec in (("weight", scheme.weight), ("activation", activation)):
        if spec.has_zero_point and spec.zero_point_domain.name != "INT":
            return f"takes integer zero points, the {what} has {spec.zero_point_domain.name}"
    return None


@register("linear", layout="plain", weight=INTEGERS, activation=("int8",), priority=20, supports=_supports)
def int8_scaled_mm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation, then the equation above."""
    wq, ws, wz = weight.plain()
    rows = x.reshape(-1, x.shape[-1])
    xq, xs, xz = quantize_input(rows, weight)
    if ws.shape[1] == 1 and wz is None and xz is None and wq.dtype == torch.int8:
        # One group: only the integer product is opaque, so that a compiler can fuse the rest.
        y = (int_matmul(xq, wq.t()).float() * ws.float().t() * xs).to(x.dtype)
    else:
        y = int8_grouped_mm(xq, xs, xz, wq, ws, wz, x.dtype)
    if bias is not None:
        y = y + bias
    return y.reshape(*x.shape[:-1], wq.shape[0])


def quantize_input(x: Tensor, weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scale, zero_point) of the input `x` (M, K), as the weight wants it: its scale dynamic or static."""
    spec = weight.scheme.activation
    assert spec is not None
    if not weight.scheme.spec.static:
        return quantize_activation(x, spec)
    scale, zero_point = weight.act_scale, weight.act_zero_point  # type: ignore[attr-defined]
    return spec.quantize(x, scale, zero_point), scale, zero_point
