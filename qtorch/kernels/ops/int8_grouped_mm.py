"""Linear with quantized activations and weights, accumulated in integers.

    y[m, n] = (sum_g (sum_{k in g} (xq[m, k] - xz[m]) (wq[n, k] - wz[n, g])) * ws[n, g]) * xs[m] + bias[n]

The inner sum is an exact integer, in int64 where an int32 might not hold it; the outer one, over the groups g of the
weight (one, for a scale per row), runs in fp32 in the order of the groups. So the result does not depend on the
machine, and training with the same spec sees the same bits.
"""

import functools

import torch
from torch import Tensor

from ...primitives import QuantSpec, is_compiling
from .. import custom_ops, registry
from . import quantize
from .int_matmul import int32_terms, int_matmul, int_sums

WEIGHT_SLICE = 4 << 20  # bytes of a grouped weight that are converted to floating point at a time
RESULT_SLICE = 1 << 20  # bytes of the result that the groups of such a slice are added to at a time, to stay in cache
EXACT_TERMS = 2**24 // (256 * 256)  # that fp32 accumulates exactly if both factors are differences of 8-bit codes


@custom_ops.opaque(lambda xq, xs, xz, wq, ws, wz, dtype: xs.new_empty(xq.shape[0], wq.shape[0], dtype=dtype))
def int8_grouped_mm(
    xq: Tensor, xs: Tensor, xz: Tensor | None, wq: Tensor, ws: Tensor, wz: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The equation above without bias.

    Args:
        xq: (M, K) int8 codes.  xs: (M, 1) or (1, 1) scale.  xz: zero point like xs, or None.
        wq: (N, K) int8 or uint8 codes.  ws: (N, G) scale, K divisible by G.  wz: (N, G) zero point, or None.
        dtype: of the result, (M, N).
    """
    if not wq.shape[1]:
        return xs.new_zeros(xq.shape[0], wq.shape[0], dtype=dtype)
    ws, up = without_large(ws)
    if ws.shape[1] == 1:
        return int8_sums(xq, xz, wq, wz).float().mul_(ws.t()).mul_(xs.float()).mul_(up).to(dtype)
    # fp32 holds the sums of a short group exactly, fp64 those of any.
    exact = torch.float32 if wq.shape[1] <= EXACT_TERMS * ws.shape[1] else torch.float64
    x = xq.to(exact) if xz is None else xq.to(exact) - xz.to(exact)
    y = xs.new_empty(xq.shape[0], wq.shape[0], dtype=torch.float32)
    step = max(1, WEIGHT_SLICE // (exact.itemsize * wq.shape[1]))
    for n in range(0, wq.shape[0], step):
        channels = slice(n, n + step)
        w = wq[channels].to(exact)
        if wz is not None:
            w = (w.unflatten(1, (ws.shape[1], -1)) - wz[channels].to(exact).unsqueeze(2)).flatten(1)
        rows = max(1, RESULT_SLICE // (4 * w.shape[0]))
        for m in range(0, xq.shape[0], rows):
            y[m : m + rows, channels] = _sum_of_groups(x[m : m + rows], w, ws[channels])
    return y.mul_(xs.float()).mul_(up).to(dtype)


def large_scale() -> float:
    """Beyond it, the product of a scale with a sum of codes may be infinite. No constant of the module: with dynamic
    shapes Dynamo takes those for inputs, and fails where two autograd functions have one."""
    return 2.0**80


def without_large(ws: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (N, G) in fp32 whose products with sums of codes are finite, and powers of two (1, N) that are multiplied
    last: 1, but for rows with scales near the largest number. So a result is finite where fp32 can represent it."""
    ws = ws.float()
    up = registry.power_if_larger(ws, large_scale(), 2.0**48)
    return ws / up, up.t()


def int8_sums(xq: Tensor, xz: Tensor | None, wq: Tensor, wz: Tensor | None, length: int | None = None) -> Tensor:
    """sum_k (xq - xz) (wq - wz), (M, N), from the plain product of the codes and their sums; one group. In int64 where
    an int32 might not hold the sums of `length` terms, by default K."""
    # Unsigned 8-bit codes do not fit int8: shift codes and zero point by 128; their difference does not change.
    if wq.dtype == torch.uint8:
        wz = wq.new_zeros(wq.shape[0], 1, dtype=torch.int32) if wz is None else wz.to(torch.int32)
        wq, wz = (wq ^ 128).view(torch.int8), wz - 128
    length = wq.shape[1] if length is None else length
    wide = torch.int32 if length <= int32_terms(xz is not None, wz is not None) else torch.int64
    total = int_sums(xq, wq.t(), wide)
    if wz is not None:
        total -= xq.sum(1, keepdim=True, dtype=wide) * wz.to(wide).t()
    if xz is not None:
        column_sums = wq.sum(1, dtype=wide)
        if wz is not None:
            column_sums -= wq.shape[1] * wz.to(wide)[:, 0]
        total -= xz.to(wide) * column_sums
    return total


def _sum_of_groups(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """sum_g (sum_{k in g} x[m, k] * w[n, k]) * scale[n, g]: the inner sums exact, the outer one in fp32, in order. Not
    by addcmul: whether that rounds once or twice depends on the processor."""
    groups = scale.shape[1]
    pieces = zip(x.chunk(groups, 1), w.chunk(groups, 1), scale.t().contiguous(), strict=True)
    parts = (torch.mm(xg, wg.t()).float().mul_(scale_g) for xg, wg, scale_g in pieces)
    return functools.reduce(Tensor.add_, parts)


def is_at_most(size: int, most: int) -> bool:
    """Whether a size is known to be, without a guard of a compiler on one that it takes for a variable."""
    if not is_compiling():
        return size <= most
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size <= most)


def fusible_int8_mm(
    xq: Tensor, xs: Tensor, xz: Tensor | None, wq: Tensor, ws: Tensor, wz: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`int8_grouped_mm`, as torch operators where a compiler can fuse them."""
    symmetric = wz is None and xz is None and wq.dtype == torch.int8
    if ws.shape[1] == 1 and symmetric and is_at_most(wq.shape[1], int32_terms()):
        # Only the integer product is opaque.
        ws, up = without_large(ws)
        return (int_matmul(xq, wq.t()).float() * ws.t() * xs.float() * up).to(dtype)
    return int8_grouped_mm(xq, xs, xz, wq, ws, wz, dtype)


@custom_ops.by_device
def int8_product(
    xq: Tensor, xs: Tensor, xz: Tensor | None, wq: Tensor, ws: Tensor, wz: Tensor | None, group: int, dtype: torch.dtype
) -> Tensor:
    """`int8_grouped_mm` of operands quantized for this product only, as in training, by the device's fastest code.
    `group` has the columns of a group, -1 for one group: a compiler would guard on a size read from a tensor."""
    return fusible_int8_mm(xq, xs, xz, wq, ws, wz, dtype)


@custom_ops.by_device
def int8_rows_product(x: Tensor, x_spec: QuantSpec, w: Tensor, w_spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """`int8_product` of x (M, K) and w (N, K) in floating point, quantized by specs of signed codes of at most 8 bits
    with a scale for each row and no zero point: (M, N)."""
    wq, ws, _ = quantize.quantize_dynamic(w, w_spec)  # random numbers of stochastic rounding come in this order
    xq, xs, _ = quantize.quantize_dynamic(x, x_spec)
    return int8_product(xq, xs, None, wq, ws, None, -1, dtype)
