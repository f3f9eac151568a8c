"""The engine: one contraction, its three matmuls, each with operands quantized along its own contracted axis.

    output       y[m, n]  = sum_k x[m, k] w[n, k]
    grad_input   dx[m, k] = sum_n g[m, n] w[n, k]
    grad_weight  dw[n, k] = sum_m g[m, n] x[m, k]

All three are `multiply(lhs, rhs)`, with the contracted axis last in both operands. Gradients use the straight-through
estimator: they are those of the full-precision contraction, computed by quantized matmuls.

Operands are quantized and multiplied by the same functions as in inference, so that the converted model gives the same
results: bit for bit where sums are exact integers.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...dtypes import AffineQuantizedTensor, QuantizedTensor
from ...dtypes.linear import multiply as multiply_served
from ...kernels.ops.block_mm import int8_block_mm
from ...kernels.ops.int8_grouped_mm import int8_product, int8_sums, without_large
from ...kernels.ops.weight_only_mm import weight_only_mm
from ...primitives import QuantSpec, Rounding
from ...primitives.tracing import run_whole, starts_no_graph, transforms_active
from .gemm_spec import GemmSpec, TrainingSpec
from .operand import (
    ContractionState,
    Operand,
    Total,
    lengthened,
    observed,
    quantize_operand,
    where_unclipped,
    with_scale_gradient,
    with_scale_in,
)

# --------------------------------------------------------------------------------------------------
# Balanced operands: what is large in one operand is moved into the other one before both are quantized.
#
#     c[a, b] = sum_c (lhs[a, c] / m[c]) (rhs[b, c] m[c]),   m[c] = max_a |lhs[a, c]|^alpha / max_b |rhs[b, c]|^beta
#
# The product stays the same; outliers along the contracted axis are shared by the two operands, as SmoothQuant (Xiao
# et al., arXiv 2211.10438, eq. 4) does it with fixed weights, here on each call (AQT, `mid_quant`). A maximum of zero
# counts as one.


MidAlpha = tuple[float, float]
"""(alpha, beta)"""


def balanced(lhs: Tensor, rhs: Tensor, alphas: MidAlpha | None) -> tuple[Tensor, Tensor]:
    """`lhs` (A, C) and `rhs` (B, C), balanced by the equation above; as they are for None."""
    if alphas is None:
        return lhs, rhs
    factor = _largest(lhs) ** alphas[0] / _largest(rhs) ** alphas[1]
    return (lhs / factor).to(lhs.dtype), (rhs * factor).to(rhs.dtype)


def _largest(x: Tensor) -> Tensor:
    """Of each contracted index, (1, C), fp32. A token that is not finite must not reach the other tokens."""
    magnitude = torch.where(x.isfinite().all(1, keepdim=True), x.abs(), 0).float()
    largest = magnitude.amax(0, keepdim=True) if x.shape[0] else magnitude.new_zeros(1, x.shape[1])
    return torch.where(largest > 0, largest, 1.0)


# --------------------------------------------------------------------------------------------------
# Warnings, each given once, about training that runs but is unlikely to learn well or be fast.


FEW_TOKENS = 256
"""Tokens below which the rounding of an INT8 gradient is not averaged out: its noise falls as their square root."""

LOST_SHARE = 0.5
"""Share of a weight's updates that may vanish in rounding before there is a warning."""

_given: set[str] = set()


def warn_once(topic: str, message: str) -> None:
    """Warn, unless there was a warning on the same topic before."""
    if topic not in _given:
        _given.add(topic)
        warnings.warn(f"qtorch: {message}", stacklevel=3)


def warn_of_few_tokens(tokens: int, grad_weight: GemmSpec) -> None:
    """Warn if the gradient of a weight, a sum over tokens, has too few of them to average out the rounding noise."""
    lhs = grad_weight.lhs
    if lhs is not None and not lhs.dtype.is_floating_point and tokens < FEW_TOKENS:
        warn_once(
            "few tokens",
            f"{lhs.dtype} gradients of weights from {tokens} tokens a batch: fewer than {FEW_TOKENS} average little of "
            "the rounding noise, and are too few to be fast; leave grad_weight in full precision, or enlarge the batch",
        )


def warn_of_lost_updates(before: Tensor, after: Tensor, wanted: Tensor) -> None:
    """Warn if rounding `wanted` (fp32) to the 16 bits of `before` loses many updates; `after` is the rounded weight."""
    moved = wanted != before.float()
    count = int(moved.sum())
    lost = int((moved & (after == before)).sum())
    if count and lost > LOST_SHARE * count:
        warn_once(
            "lost updates",
            f"{lost / count:.0%} of an update of a {str(before.dtype).removeprefix('torch.')} weight of shape "
            f"{tuple(before.shape)} vanish in rounding: they are below half a unit in the last place of the weight. "
            "Keep the weights in fp32 (and use autocast), or use int8_weight_only_quantized_training(), which rounds "
            "stochastically",
        )


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether small updates vanish in weights of this dtype."""
    return dtype in (torch.bfloat16, torch.float16)


def multiply(lhs: Operand, rhs: Operand, gemm: GemmSpec, dtype: torch.dtype, total: Total | None = None) -> Tensor:
    """c[a, b] = sum_c lhs[a, c] rhs[b, c], (lhs.kept, rhs.kept), in `gemm.output_dtype` or else `dtype`.

    Args:
        total: adds the same product of other processes, which have other parts of c: integers before they are scaled.
    """
    dtype = gemm.output_dtype or dtype
    lhs, rhs = _of_equal_length(lhs, rhs)
    if lhs.spec is None and rhs.spec is None:
        # Under autocast, the activation has the dtype to compute in, and the weight its own.
        compute = gemm.accumulator_dtype or lhs.values.dtype
        result = torch.mm(lhs.values.to(compute), rhs.values.to(compute).t())
    elif gemm.accumulator_dtype is not None and gemm.accumulates_floats:
        compute = gemm.accumulator_dtype
        result = torch.mm(lhs.dequantize(compute), rhs.dequantize(compute).t())
    elif lhs.is_integer and rhs.is_integer:
        gemm.check_sum(lhs.values.shape[1])
        if total is None or not _has_one_group(lhs, rhs):
            result = _integer_product(lhs, rhs, dtype if total is None else torch.float32)
        else:
            result, total = _scaled_sums(lhs, rhs, total), None
    elif rhs.spec is None:
        result = torch.mm(lhs.dequantize(torch.float32), rhs.values.float().t())
    else:
        # As in inference: the activation in fp32 if it is quantized, else in its own dtype.
        x = lhs.values if lhs.spec is None else lhs.dequantize(torch.float32)
        result = _dequantizing_product(x, rhs)
    return (result if total is None else total(result)).to(dtype)[: lhs.kept, : rhs.kept]


def _of_equal_length(lhs: Operand, rhs: Operand) -> tuple[Operand, Operand]:
    """Pad an operand in floating point to the length of the other one, which has whole blocks."""
    if lhs.spec is None:
        return lhs._replace(values=lengthened(lhs.values, rhs)), rhs
    if rhs.spec is None:
        return lhs, rhs._replace(values=lengthened(rhs.values, lhs))
    return lhs, rhs


def _integer_product(lhs: Operand, rhs: Operand, dtype: torch.dtype) -> Tensor:
    assert lhs.scale is not None
    assert rhs.scale is not None
    if lhs.scale.shape[1] > 1:
        return int8_block_mm(lhs.values, lhs.scale, rhs.values, rhs.scale, dtype)
    (xs, xz), (ws, wz) = lhs.scales_per_row(), rhs.scales_per_row()
    assert rhs.spec is not None
    return int8_product(lhs.values, xs, xz, rhs.values, ws, wz, rhs.spec.granularity.pattern(2)[1], dtype)


def _has_one_group(lhs: Operand, rhs: Operand) -> bool:
    """Whether a sum over the whole contracted axis is multiplied by one scale of each operand."""
    return all(side.spec is not None and side.spec.granularity.pattern(2)[1] == -1 for side in (lhs, rhs))


def _scaled_sums(lhs: Operand, rhs: Operand, total: Total) -> Tensor:
    """`_integer_product` in fp32 of one group, whose integers are parts of a sum."""
    (xs, xz), (ws, wz) = lhs.scales_per_row(), rhs.scales_per_row()
    sums = total(int8_sums(lhs.values, xz, rhs.values, wz, total.length))
    ws, up = without_large(ws)
    return sums.float().mul_(ws.t()).mul_(xs.float()).mul_(up)


def _dequantizing_product(x: Tensor, rhs: Operand) -> Tensor:
    assert rhs.spec is not None
    assert rhs.scale is not None
    low, high = rhs.spec.code_range
    domain = rhs.spec.zero_point_domain.name
    name = rhs.spec.dtype.name
    return weight_only_mm(x, rhs.values, rhs.scale, rhs.zero_point, name, float(low), float(high), domain)


def contraction(x: Tensor, w: Tensor, spec: TrainingSpec, state: ContractionState | None = None) -> Tensor:
    """y[m, n] = sum_k x[m, k] w[n, k], with gradients, its matmuls as `spec` says.

    Args:
        x: (M, K) floating point.
        w: (N, K) floating point, or a weight that trains (`TrainingWeight`).
        state: what is kept from call to call, if anything is.

    Returns:
        (M, N) in the dtype of x.
    """
    if transforms_active():
        return run_whole(contraction, x, w, spec, state)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        return _Contraction.apply(x, w, spec, state)
    return _output(x, w, spec, state)[0]


def _output(
    x: Tensor, w: Tensor, spec: TrainingSpec, state: ContractionState | None
) -> tuple[Tensor, Operand, Operand]:
    """The forward matmul, and its operands."""
    if isinstance(w, AffineQuantizedTensor):  # stored as codes: multiplied as in inference
        xq = quantize_operand(x, spec.output.lhs if spec.grad_weight.reuse_forward else None, tokens=True)
        return multiply_served(x, w.convert()), xq, Operand(w, w.shape[0])  # type: ignore[attr-defined]
    xq, wq = operands_of(x, _floats(w), "output", spec.output, state)
    return multiply(xq, wq, spec.output, x.dtype, _total("output", state)), xq, wq


def _total(product: str, state: ContractionState | None) -> Total | None:
    return None if state is None else state.total_of(product)


def operands_of(
    lhs: Tensor, rhs: Tensor, name: str, gemm: GemmSpec, state: ContractionState | None
) -> tuple[Operand, Operand]:
    """Both operands of a matmul whose operands are in floating point, quantized; the rows of lhs are independent."""
    if state is not None and not state.active:
        observed(lhs, f"{name}.lhs", gemm.lhs, state)
        observed(rhs, f"{name}.rhs", gemm.rhs, state)
        return Operand(lhs, lhs.shape[0]), Operand(rhs, rhs.shape[0])
    lhs, rhs = balanced(lhs, rhs, gemm.mid_alpha)
    left, right = (_block_length(spec) for spec in (gemm.lhs, gemm.rhs))
    if gemm.fold == "lhs":
        rhs, a = with_scale_in(rhs, quantize_operand(lhs, gemm.lhs, right, False, f"{name}.lhs", state))
        return a, quantize_operand(rhs, gemm.rhs, left, False, f"{name}.rhs", state)
    b = quantize_operand(rhs, gemm.rhs, left, False, f"{name}.rhs", state)
    if gemm.fold == "rhs":
        lhs, b = with_scale_in(lhs, b)
    return quantize_operand(lhs, gemm.lhs, right, True, f"{name}.lhs", state), b


def _floats(w: Tensor) -> Tensor:
    return w.floats() if isinstance(w, QuantizedTensor) else w  # type: ignore[attr-defined]


def _block_length(spec: QuantSpec | None) -> int:
    """Size of the blocks along the contracted axis, 1 where the whole axis is one block."""
    return 1 if spec is None else max(1, spec.granularity.pattern(2)[1])


class _Contraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, spec: TrainingSpec, state: ContractionState | None) -> Tensor:
        y, xq, wq = _output(x, w, spec, state)
        ctx.spec, ctx.state = spec, state
        quantizes = state is None or state.active
        ctx.x_dtype, ctx.w_dtype = x.dtype, w.dtype
        ctx.x_spec = ctx.w_spec = None
        held_x: tuple[Tensor | None, ...] = (x, None, None)
        ctx.codes = None
        held_w: tuple[Tensor | None, ...] = (w, None, None)
        if isinstance(w, QuantizedTensor) and not torch.compiler.is_compiling():
            # Save the inner tensors: a saved parameter could not be exchanged by its module (`model.to`).
            if isinstance(w, AffineQuantizedTensor):
                ctx.codes = type(w), w.scheme
                held_w = (w.qdata, w.scale, w.zero_point)  # type: ignore[attr-defined]
            else:
                held_w = (_floats(w), None, None)
        if spec.grad_weight.reuse_forward and quantizes:
            xq = xq.in_blocks()
            held_x, ctx.x_spec = (xq.values, xq.scale, xq.zero_point), xq.spec
        # Quantizing the weight again gives the codes of the forward, unless rounding is stochastic, or ranges follow.
        anew = not _is_random(wq.spec) and state is None
        if spec.grad_input.reuse_forward and quantizes and not anew and not isinstance(w, AffineQuantizedTensor):
            held_w, ctx.w_spec = (wq.values, wq.scale, wq.zero_point), wq.spec
        needs_x, needs_w = x.requires_grad, w.requires_grad
        if spec.scale_gradient or spec.clip_gradient:
            needs_x = needs_w = True
            ctx.clipped = _clipped(x, w, xq, wq) if spec.clip_gradient and quantizes else (None, None)
        ctx.save_for_backward(*(held_x if needs_w else (None,) * 3), *(held_w if needs_x else (None,) * 3))
        ctx.sizes = (*x.shape, w.shape[0])
        ctx.quantizes = quantizes
        return y

    @staticmethod
    @once_differentiable
    @starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grad_outputs
        spec: TrainingSpec = ctx.spec
        x, xs, xz, w, ws, wz = ctx.saved_tensors
        if ctx.codes is not None and w is not None:
            kind, scheme = ctx.codes
            w, ws, wz = kind({"qdata": w, "scale": ws, "zero_point": wz}, scheme), None, None
        grad_x = grad_w = None
        m, k, n = ctx.sizes
        if ctx.needs_input_grad[0]:
            rhs = Operand(w, n, ws, wz, ctx.w_spec) if ctx.w_spec is not None else None
            grad_x = _backward_matmul(g, w, rhs, "grad_input", ctx, k, ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            if not torch.compiler.is_compiling():
                warn_of_few_tokens(m, spec.grad_weight)
            rhs = Operand(x, m, xs, xz, ctx.x_spec) if ctx.x_spec is not None else None
            grad_w = _backward_matmul(g.t(), x, rhs, "grad_weight", ctx, k, ctx.w_dtype)
        if spec.scale_gradient and ctx.quantizes:
            if grad_x is not None and spec.output.lhs is not None:
                grad_x = with_scale_gradient(grad_x, x, spec.output.lhs)
            if grad_w is not None and spec.output.rhs is not None:
                grad_w = with_scale_gradient(grad_w, _floats(w), spec.output.rhs)
        if spec.clip_gradient:
            grad_x, grad_w = (
                grad if grad is None or mask is None else torch.where(mask, grad, 0)
                for grad, mask in zip((grad_x, grad_w), ctx.clipped, strict=True)
            )
        return grad_x, grad_w, None, None


def _backward_matmul(
    g: Tensor, other: Tensor, held: Operand | None, name: str, ctx: Any, kept: int, dtype: torch.dtype
) -> Tensor:
    """g (A, C) times `other` (C, kept), an operand of the forward: quantized again, or as the forward quantized it."""
    spec: TrainingSpec = ctx.spec
    gemm: GemmSpec = getattr(spec, name)
    state: ContractionState | None = ctx.state
    total = _total(name, state)
    if gemm.reuse_forward and isinstance(other, AffineQuantizedTensor):
        return multiply_served(g, other.convert().with_activation(None).t()).to(dtype)  # type: ignore[attr-defined]
    if gemm.reuse_forward and ctx.quantizes:
        forward = held
        if forward is None:
            forward = quantize_operand(_floats(other), spec.output.rhs, _block_length(spec.output.lhs))
        rhs = forward.transposed(kept)
        if gemm.lhs is not None and not gemm.accumulates_floats:
            g, rhs = with_scale_in(g, rhs)
        g = lengthened(g, rhs)
        return multiply(quantize_operand(g, gemm.lhs, 1, True, f"{name}.lhs", state), rhs, gemm, dtype, total)
    if gemm.reuse_forward:
        observed(g, f"{name}.lhs", gemm.lhs, state)
        return torch.mm(g.to(dtype), _floats(other).to(dtype))
    return multiply(*operands_of(g, _floats(other).t(), name, gemm, state), gemm, dtype, total)


def _clipped(x: Tensor, w: Tensor, xq: Operand, wq: Operand) -> tuple[Tensor | None, Tensor | None]:
    """Masks of the elements of both operands that have a gradient."""
    return where_unclipped(x, xq), where_unclipped(_floats(w), wq)


def _is_random(spec: QuantSpec | None) -> bool:
    return spec is not None and spec.rounding is Rounding.STOCHASTIC
