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

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ...dtypes import AffineQuantizedTensor, QuantizedTensor
from ...dtypes.linear import multiply as multiply_served
from ...kernels.ops.int8_block_mm import int8_block_mm, pad_to_blocks
from ...kernels.ops.int8_grouped_mm import int8_product
from ...kernels.ops.quantize_rowwise import dequantize_rows, quantize_dynamic, quantize_rows
from ...kernels.ops.weight_only_mm import weight_only_mm
from ...kernels.rows import scale_per_row
from ...primitives import QuantSpec, Rounding
from ...primitives.granularity import granularity_of
from ...tracing.function_transforms import run_whole, transforms_active
from ...tracing.outside_graphs import starts_no_graph
from .guardrails import warn_of_few_tokens
from .scale_gradient import with_scale_gradient
from .spec import GemmSpec, TrainingSpec


class Operand(NamedTuple):
    """One side of a matmul, (kept, contracted): codes with their scale and zero point, or floats (spec None).

    Quantized operands may have more rows than `kept`: their blocks are padded with zeros. The scale may have an element
    per row where its spec has one for several rows; see `quantize_rows`.
    """

    values: Tensor
    kept: int
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    spec: QuantSpec | None = None

    @property
    def is_integer(self) -> bool:
        return self.spec is not None and not self.spec.dtype.is_floating_point and self.spec.dtype.bits <= 8

    def transposed(self, kept: int) -> Operand:
        """The transposed operand; the first `kept` indices of its rows are not padding."""
        if self.spec is None:
            return Operand(self.values.t(), kept)
        assert self.scale is not None
        zero_point = None if self.zero_point is None else self.zero_point.t()
        spec = self.spec.with_granularity(granularity_of(self.spec.granularity.pattern(2)[::-1]))
        return Operand(self.values.t(), kept, self.scale.t(), zero_point, spec)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        if self.spec is None:
            return self.values.to(dtype)
        assert self.scale is not None
        return dequantize_rows(self.spec, self.values, self.scale, self.zero_point, dtype)

    def scales_per_row(self) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point with a row for each row of codes."""
        assert self.scale is not None
        rows = self.values.shape[0]
        zero_point = None if self.zero_point is None else scale_per_row(self.zero_point, rows)
        return scale_per_row(self.scale, rows), zero_point

    def in_blocks(self) -> Operand:
        """The operand with a scale for each block of the spec, NaN if one of its rows has NaN."""
        if self.spec is None or self.scale is None or self.spec.dtype.has_nan or not self.values.shape[0]:
            return self
        rows = self.spec.granularity.pattern(2)[0]
        if rows == 1:
            return self
        blocks = (1, -1) if rows == -1 else (-1, rows)
        zero_point = None if self.zero_point is None else self.zero_point.unflatten(0, blocks).select(1, 0)
        return self._replace(scale=self.scale.unflatten(0, blocks).amax(1), zero_point=zero_point)


def quantize_operand(x: Tensor, spec: QuantSpec | None, contracted: int = 1, tokens: bool = False) -> Operand:
    """Quantize `x` (kept, contracted) by `spec`, padded with zeros to whole blocks and to a multiple of `contracted`.

    Args:
        tokens: rows are independent: a NaN or an infinity in a row of x affects that row of a product only.
    """
    if spec is None:
        return Operand(x, x.shape[0])
    quantize = quantize_rows if tokens else quantize_dynamic
    codes, scale, zero_point = quantize(pad_to_blocks(x, spec.granularity, contracted), spec)
    return Operand(codes, x.shape[0], scale, zero_point, spec)


def multiply(lhs: Operand, rhs: Operand, gemm: GemmSpec, dtype: torch.dtype) -> Tensor:
    """c[a, b] = sum_c lhs[a, c] rhs[b, c], (lhs.kept, rhs.kept), in `gemm.output_dtype` or else `dtype`."""
    dtype = gemm.output_dtype or dtype
    lhs, rhs = _of_equal_length(lhs, rhs)
    if lhs.spec is None and rhs.spec is None:
        # Under autocast, the activation has the dtype to compute in, and the weight its own.
        compute = gemm.accumulator_dtype or lhs.values.dtype
        result = torch.mm(lhs.values.to(compute), rhs.values.to(compute).t()).to(dtype)
    elif gemm.accumulator_dtype is not None:
        compute = gemm.accumulator_dtype
        result = torch.mm(lhs.dequantize(compute), rhs.dequantize(compute).t()).to(dtype)
    elif lhs.is_integer and rhs.is_integer:
        result = _integer_product(lhs, rhs, dtype)
    elif rhs.spec is None:
        result = torch.mm(lhs.dequantize(torch.float32), rhs.values.float().t()).to(dtype)
    else:
        # As in inference: the activation in fp32 if it is quantized, else in its own dtype.
        x = lhs.values if lhs.spec is None else lhs.dequantize(torch.float32)
        result = _dequantizing_product(x, rhs).to(dtype)
    return result[: lhs.kept, : rhs.kept]


def _of_equal_length(lhs: Operand, rhs: Operand) -> tuple[Operand, Operand]:
    """Pad an operand in floating point to the length of the other one, which has whole blocks."""
    if lhs.spec is None:
        return lhs._replace(values=_lengthened(lhs.values, rhs)), rhs
    if rhs.spec is None:
        return lhs, rhs._replace(values=_lengthened(rhs.values, lhs))
    return lhs, rhs


def _lengthened(x: Tensor, other: Operand) -> Tensor:
    """`x` in floating point, padded to the length of `other` along the contracted axis."""
    if other.spec is None or max(other.spec.granularity.pattern(2)) <= 1:
        return x
    missing = other.values.shape[1] - x.shape[1]
    return pad(x, (0, missing)) if torch.compiler.is_compiling() or missing else x


def _integer_product(lhs: Operand, rhs: Operand, dtype: torch.dtype) -> Tensor:
    assert lhs.scale is not None
    assert rhs.scale is not None
    if lhs.scale.shape[1] > 1:
        return int8_block_mm(lhs.values, lhs.scale, rhs.values, rhs.scale, dtype)
    (xs, xz), (ws, wz) = lhs.scales_per_row(), rhs.scales_per_row()
    assert rhs.spec is not None
    return int8_product(lhs.values, xs, xz, rhs.values, ws, wz, rhs.spec.granularity.pattern(2)[1], dtype)


def _dequantizing_product(x: Tensor, rhs: Operand) -> Tensor:
    assert rhs.spec is not None
    assert rhs.scale is not None
    low, high = rhs.spec.code_range
    domain = rhs.spec.zero_point_domain.name
    name = rhs.spec.dtype.name
    return weight_only_mm(x, rhs.values, rhs.scale, rhs.zero_point, name, float(low), float(high), domain)


def contraction(x: Tensor, w: Tensor, spec: TrainingSpec) -> Tensor:
    """y[m, n] = sum_k x[m, k] w[n, k], with gradients, its matmuls as `spec` says.

    Args:
        x: (M, K) floating point.
        w: (N, K) floating point, or a weight that trains (`TrainingWeight`).

    Returns:
        (M, N) in the dtype of x.
    """
    if transforms_active():
        return run_whole(contraction, x, w, spec)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        return _Contraction.apply(x, w, spec)
    return _output(x, w, spec)[0]


def _output(x: Tensor, w: Tensor, spec: TrainingSpec) -> tuple[Tensor, Operand, Operand]:
    """The forward matmul, and its operands."""
    if isinstance(w, AffineQuantizedTensor):  # stored as codes: multiplied as in inference
        xq = quantize_operand(x, spec.output.lhs if spec.grad_weight.reuse_forward else None, tokens=True)
        return multiply_served(x, w.convert()), xq, Operand(w, w.shape[0])  # type: ignore[attr-defined]
    wq = _forward_weight(w, spec)
    xq = quantize_operand(x, spec.output.lhs, _block_length(spec.output.rhs), tokens=True)
    return multiply(xq, wq, spec.output, x.dtype), xq, wq


def _forward_weight(w: Tensor, spec: TrainingSpec) -> Operand:
    return quantize_operand(_floats(w), spec.output.rhs, _block_length(spec.output.lhs))


def _floats(w: Tensor) -> Tensor:
    return w.floats() if isinstance(w, QuantizedTensor) else w  # type: ignore[attr-defined]


def _block_length(spec: QuantSpec | None) -> int:
    """Size of the blocks along the contracted axis, 1 where the whole axis is one block."""
    return 1 if spec is None else max(1, spec.granularity.pattern(2)[1])


class _Contraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, spec: TrainingSpec) -> Tensor:
        y, xq, wq = _output(x, w, spec)
        ctx.spec = spec
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
        if spec.grad_weight.reuse_forward:
            xq = xq.in_blocks()
            held_x, ctx.x_spec = (xq.values, xq.scale, xq.zero_point), xq.spec
        # Quantizing the weight again gives the codes of the forward, unless rounding is stochastic.
        if spec.grad_input.reuse_forward and _is_random(wq.spec) and not isinstance(w, AffineQuantizedTensor):
            held_w, ctx.w_spec = (wq.values, wq.scale, wq.zero_point), wq.spec
        needs_x, needs_w = x.requires_grad, w.requires_grad
        if spec.scale_gradient:
            needs_x = needs_w = True
        ctx.save_for_backward(*(held_x if needs_w else (None,) * 3), *(held_w if needs_x else (None,) * 3))
        ctx.sizes = (*x.shape, w.shape[0])
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
            grad_x = _backward_matmul(g, w, rhs, spec, spec.grad_input, k, ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            if not torch.compiler.is_compiling():
                warn_of_few_tokens(m, spec.grad_weight)
            rhs = Operand(x, m, xs, xz, ctx.x_spec) if ctx.x_spec is not None else None
            grad_w = _backward_matmul(g.t(), x, rhs, spec, spec.grad_weight, k, ctx.w_dtype)
        if spec.scale_gradient:
            if grad_x is not None and spec.output.lhs is not None:
                grad_x = with_scale_gradient(grad_x, x, spec.output.lhs)
            if grad_w is not None and spec.output.rhs is not None:
                grad_w = with_scale_gradient(grad_w, _floats(w), spec.output.rhs)
        return grad_x, grad_w, None


def _backward_matmul(
    g: Tensor, other: Tensor, held: Operand | None, spec: TrainingSpec, gemm: GemmSpec, kept: int, dtype: torch.dtype
) -> Tensor:
    """g (A, C) times `other` (C, kept), an operand of the forward: quantized again, or as the forward quantized it."""
    if gemm.reuse_forward and isinstance(other, AffineQuantizedTensor):
        return multiply_served(g, other.convert().with_activation(None).t()).to(dtype)  # type: ignore[attr-defined]
    if gemm.reuse_forward:
        forward = held if held is not None else _forward_weight(other, spec)
        rhs = forward.transposed(kept)
        if gemm.lhs is not None and gemm.accumulator_dtype is None:
            g, rhs = _fold_scale(g, rhs)
        return multiply(quantize_operand(_lengthened(g, rhs), gemm.lhs, tokens=True), rhs, gemm, dtype)
    rhs = quantize_operand(_floats(other).t(), gemm.rhs, _block_length(gemm.lhs))
    return multiply(quantize_operand(g, gemm.lhs, _block_length(gemm.rhs), tokens=True), rhs, gemm, dtype)


def _fold_scale(g: Tensor, rhs: Operand) -> tuple[Tensor, Operand]:
    """Multiply a scale (1, C) per contracted index into the other operand: sum_c g (q s) = sum_c (g s) q."""
    assert rhs.spec is not None
    assert rhs.scale is not None
    if rhs.spec.granularity.pattern(2) != (-1, 1):
        return g, rhs
    scaled = _lengthened(g, rhs) * rhs.scale.to(torch.float32)
    return scaled, rhs._replace(scale=torch.ones_like(rhs.scale[:, :1]), spec=rhs.spec.with_granularity(_WHOLE))


_WHOLE = granularity_of((-1, -1))


def _is_random(spec: QuantSpec | None) -> bool:
    return spec is not None and spec.rounding is Rounding.STOCHASTIC
