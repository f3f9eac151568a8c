"""Linear with float8 activations and weights on CUDA, by the tensor cores' float8 products.

    y[m, n] = (sum_k xq[m, k] * wq[n, k]) * xs[m] * ws[n] + bias[n]

Scales per token and output channel, or one of each, through `torch._scaled_mm`; scales of blocks through Triton
(`block_mm.tile_scaled_mm` has the equation). Sums have the precision of the hardware's float8 accumulator.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import custom_ops, features
from ..ops.block_mm import tile_scaled_mm
from ..ops.quantize import quantize_input
from ..registry import Problem, QuantizedWeight, from_rows, needs_matrix, register, to_rows

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@custom_ops.opaque(lambda xq, xs, wq, ws, dtype: xs.new_empty(xq.shape[0], wq.shape[0], dtype=dtype))
def float8_scaled_mm(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, dtype: torch.dtype) -> Tensor:
    """The equation above without bias.

    Args:
        xq: (M, K) float8.  xs: (M, 1) or (1, 1) fp32.
        wq: (N, K) float8.  ws: (N, 1) or (1, 1) fp32.
        dtype: of the result, (M, N).
    """
    (m, k), n = xq.shape, wq.shape[0]
    float8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    if xq.dtype not in float8 or wq.dtype not in float8 or wq.shape[1] != k:
        raise ValueError(
            f"float8_scaled_mm takes float8 (M, K) and (N, K), got {tuple(xq.shape)} of {xq.dtype} and "
            f"{tuple(wq.shape)} of {wq.dtype}"
        )
    if tuple(xs.shape) not in ((m, 1), (1, 1)) or tuple(ws.shape) not in ((n, 1), (1, 1)):
        raise ValueError(
            f"float8_scaled_mm takes scales (M, 1) or (1, 1) and (N, 1) or (1, 1), got {tuple(xs.shape)} and "
            f"{tuple(ws.shape)} for M, N = {(m, n)}"
        )
    if not m or not n or not k:
        return xs.new_zeros(m, n, dtype=dtype)
    # Pad K and N to multiples of 16 with zeros; the weight has to be column-major.
    inner, columns = -k % 16, -n % 16
    if inner or columns:
        xq, wq = (pad(q.view(torch.uint8), (0, inner, 0, rows)).view(q.dtype) for q, rows in ((xq, 0), (wq, columns)))
        ws = ws if ws.shape[0] == 1 else pad(ws, (0, 0, 0, columns), value=1.0)
    xq, wt = xq.contiguous(), wq.contiguous().t()
    by_rows = xs.numel() > 1 or ws.numel() > 1
    if not by_rows:
        y = torch._scaled_mm(xq, wt, xs.reshape(()), ws.reshape(()), out_dtype=dtype)
    elif dtype == torch.bfloat16:
        rows, of_columns = xs.expand(m, 1).contiguous(), ws.t().expand(1, n + columns).contiguous()
        y = torch._scaled_mm(xq, wt, rows, of_columns, out_dtype=dtype)
    else:
        # Scales by rows are supported for bf16 results only.
        one = xs.new_ones(())
        y = (torch._scaled_mm(xq, wt, one, one, out_dtype=torch.float32) * ws.t() * xs).to(dtype)
    return y[:, :n] if columns else y


def _supports(problem: Problem) -> str | None:
    scheme = problem.scheme
    if reason := features.cuda_lacks("float8") or needs_matrix(problem):
        return reason
    weight, activation = scheme.weight, scheme.activation
    assert activation is not None
    if any(spec.granularity.pattern(2) not in ((1, -1), (-1, -1)) for spec in (weight, activation)):
        return f"takes scales of whole rows or tensors, got {weight.granularity} and {activation.granularity}"
    if weight.dtype.name == activation.dtype.name == "float8_e5m2":
        return "the hardware does not multiply float8_e5m2 by float8_e5m2"
    return "takes symmetric codes" if weight.has_zero_point or activation.has_zero_point else None


_register = functools.partial(register, "linear", layout="plain", device="cuda", priority=30)


@_register(weight=FLOAT8, activation=FLOAT8, supports=_supports, name="float8_scaled_mm")
def float8_scaled_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation, then the equation above."""
    wq, ws, _ = weight.plain()
    xq, xs, _ = quantize_input(to_rows(x), weight)
    return from_rows(float8_scaled_mm(xq, xs, wq, ws, x.dtype), x, bias)


def _supports_tiles(problem: Problem) -> str | None:
    scheme = problem.scheme
    if reason := features.cuda_lacks("float8") or features.cuda_lacks("triton") or needs_matrix(problem):
        return reason
    weight, activation = scheme.weight, scheme.activation
    assert activation is not None
    block = activation.granularity.pattern(2)[1]
    if block < 2 or scheme.shape[1] % block or weight.block_size(scheme.shape)[1] != block:
        return f"takes blocks of one size that divide a row, got {weight.granularity} and {activation.granularity}"
    if scheme.spec.static or activation.scale_dtype is not torch.float32 or weight.scale_spec is not None:
        return "takes scales of activations in fp32, computed on each call, and plain ones of weights"
    return "takes symmetric codes" if weight.has_zero_point or activation.has_zero_point else None


@_register(weight=FLOAT8[:1], activation=FLOAT8[:1], supports=_supports_tiles, name="tile_scaled_mm")
def float8_tile_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation in blocks of a row, then `tile_scaled_mm`."""
    wq, ws, _ = weight.plain()
    xq, xs, _ = quantize_input(to_rows(x), weight)
    return from_rows(tile_scaled_mm(xq, wq, xs, ws.float(), x.dtype), x, bias)
