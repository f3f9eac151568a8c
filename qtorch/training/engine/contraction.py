"""The engine: one contraction, its three matmuls, each with operands quantized along its own contracted axis.

    output       y[m, n]  = sum_k x[m, k] w[n, k]
    grad_input   dx[m, k] = sum_n g[m, n] w[n, k]
    grad_weight  dw[n, k] = sum_m g[m, n] x[m, k]

All three are `multiply(lhs, rhs)` of two operands (`operand`), with the contracted axis last in both. Gradients are
those of the full-precision contraction, computed by quantized matmuls: rounding is passed straight through, unless
`OperandGradient` says more.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...dtypes import AffineQuantizedTensor, LUTQuantizedTensor, QuantizedTensor, linear
from ...kernels.ops import block_mm, int8_grouped_mm
from ...primitives import QuantSpec, Rounding, affine, double_quant, granularity, tracing
from ...primitives.rotated_spec import rotate_blocks, sylvester
from .gemm_spec import GemmSpec, TrainingSpec
from .operand import STATELESS, ContractionState, Operand, as_long_as, multiply, observed, quantize_operand

FEW_TOKENS = 256
"""Tokens below which the rounding of an INT8 gradient is not averaged out: its noise falls as their square root."""

IN_CODES: tuple[Any, ...] = (AffineQuantizedTensor, LUTQuantizedTensor)
"""Classes of weights without a copy in floating point: those that train convert to the codes that they have."""

_given: set[str] = set()


def warn_once(topic: str, message: str) -> None:
    """Warn, unless there was a warning on the same topic before."""
    if topic not in _given:
        _given.add(topic)
        warnings.warn(f"qtorch: {message}", stacklevel=3)


def contraction(x: Tensor, w: Tensor, spec: TrainingSpec, state: ContractionState = STATELESS) -> Tensor:
    """y[m, n] = sum_k x[m, k] w[n, k], with gradients, its matmuls as `spec` says.

    Args:
        x: (M, K) floating point.
        w: (N, K) floating point, or a weight that trains (`TrainingWeight`).
        state: what is kept from call to call, if anything is.

    Returns:
        (M, N) in the dtype of x.
    """
    if tracing.transforms_active():
        return tracing.run_whole(contraction, x, w, spec, state)
    if torch.is_grad_enabled() and (x.requires_grad or linear.requires_grad(w)):
        return _Contraction.apply(x, w, spec, state)
    if isinstance(w, IN_CODES):  # in codes: multiplied as in inference
        return linear.multiply(x, w.convert())
    return product(x, _values(w), "output", spec.output, state, x.dtype)


def product(
    lhs: Tensor, rhs: Tensor | Operand, name: str, gemm: GemmSpec, state: ContractionState, dtype: torch.dtype
) -> Tensor:
    """One matmul of operands (A, C) and (B, C) in floating point, quantized for it alone: (A, B)."""
    if gemm.is_int8_by_rows and state is STATELESS and isinstance(rhs, Tensor):
        return int8_grouped_mm.int8_rows_product(lhs, gemm.lhs, rhs, gemm.rhs, gemm.output_dtype or dtype)  # type: ignore[arg-type]
    return multiply(*operands_of(lhs, rhs, name, gemm, state), gemm, dtype, state.total_of(name))


class _Contraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Any, spec: TrainingSpec, state: ContractionState) -> Tensor:
        ctx.spec, ctx.state, ctx.active = spec, state, state.active
        about = w.scheme if isinstance(w, QuantizedTensor) else w  # attributes of a subclass are dispatched
        ctx.x_dtype, ctx.w_dtype, ctx.length = x.dtype, about.dtype, x.shape[1]
        ctx.codes, ctx.of_x, ctx.of_w = None, STRAIGHT_THROUGH, STRAIGHT_THROUGH
        # Inner tensors are saved, not the parameter, which its module could not exchange then (`model.to`).
        saved_x, saved_w = Operand(x, x.shape[0]), Operand(w, about.shape[0])
        whole = tracing.is_compiling()
        if isinstance(w, IN_CODES):
            y = linear.multiply(x, w.convert())
            if spec.grad_weight.reuse_forward:
                saved_x = quantize_operand(x, spec.output.lhs, tokens=True).in_blocks()
            if not whole:
                ctx.codes = type(w), w.scheme, tuple(w.inner_tensors)
        else:
            floats = _values(w)
            saved_w = floats if isinstance(floats, Operand) else saved_w if whole else saved_w._replace(values=floats)
            if not (spec.keeps_operands and ctx.active):
                y = product(x, floats, "output", spec.output, state, x.dtype)
            else:
                xq, wq = operands_of(x, floats, "output", spec.output, state)
                y = multiply(xq, wq, spec.output, x.dtype, state.total_of("output"))
                saved_x = xq.in_blocks() if spec.grad_weight.reuse_forward else saved_x
                # Quantizing w again gives the same codes, unless rounding is stochastic, or ranges follow.
                again = state.repeats and (wq.spec is None or wq.spec.rounding is not Rounding.STOCHASTIC)
                saved_w = wq if spec.grad_input.reuse_forward and not again and saved_w.spec is None else saved_w
                if spec.scale_gradient or spec.clip_gradient:
                    ctx.of_x = OperandGradient.of(x, xq, spec.output.lhs, spec)
                    ctx.of_w = OperandGradient.of(_floats(w), wq, spec.output.rhs, spec)
        needs_x, needs_w = (needed or spec.scale_gradient for needed in ctx.needs_input_grad[:2])
        tensors_x = (saved_x.values, saved_x.scale, saved_x.zero_point) if needs_w else (None, None, None)
        tensors_w: Any = (saved_w.values, saved_w.scale, saved_w.zero_point)
        if ctx.codes is not None:
            tensors_w = w.inner_tensors.values()
        ctx.save_for_backward(*tensors_x, *(tensors_w if needs_x else [None] * len(tensors_w)))
        ctx.saved = saved_x.kept, saved_x.spec, saved_w.kept, saved_w.spec
        # Graphs of torch 2.11 lose the gradient of a result that is also an earlier tensor, as by `to` its own dtype.
        return y.view(y.shape) if whole else y

    @staticmethod
    @torch.autograd.function.once_differentiable
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grad_outputs
        x, xs, xz, *of_w = ctx.saved_tensors
        m, x_spec, n, w_spec = ctx.saved
        if ctx.codes is not None:
            kind, scheme, names = ctx.codes
            of_w = [None if of_w[0] is None else kind(dict(zip(names, of_w)), scheme), None, None]
        w, ws, wz = of_w
        grad_x, grad_w = None, None
        if ctx.needs_input_grad[0]:
            grad_x = _backward_matmul(g, Operand(w, n, ws, wz, w_spec), "grad_input", ctx, ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            _warn_of_few_tokens(m, ctx.spec.grad_weight)
            grad_w = _backward_matmul(g.t(), Operand(x, m, xs, xz, x_spec), "grad_weight", ctx, ctx.w_dtype)
        return ctx.of_x(grad_x, x), ctx.of_w(grad_w, w if ctx.of_w.scale is None else _floats(w)), None, None


def _backward_matmul(g: Tensor, other: Operand, name: str, ctx: Any, dtype: torch.dtype) -> Tensor:
    """g (A, C) times `other` (C, kept), an operand of the forward: quantized again, or as the forward quantized it."""
    gemm: GemmSpec = getattr(ctx.spec, name)
    state: ContractionState = ctx.state
    if not gemm.reuse_forward and other.spec is None:
        return product(g, _floats(other.values).t(), name, gemm, state, dtype)
    if isinstance(other.values, IN_CODES):
        return linear.multiply(g, other.values.convert().with_activation(None).t()).to(dtype)
    if not ctx.active:
        observed(g, f"{name}.lhs", gemm.lhs, state)
        return torch.mm(g.to(dtype), _floats(other.values).to(dtype))
    if other.spec is None:
        other = quantize_operand(_floats(other.values), ctx.spec.output.rhs, ctx.spec.output.blocks[0])
    rhs = other.transposed(ctx.length)
    if gemm.lhs is not None and not gemm.accumulates_floats:
        g, rhs = with_scale_in(g, rhs)
    lhs = quantize_operand(as_long_as(g, rhs), gemm.lhs, 1, True, f"{name}.lhs", state)
    return multiply(lhs, rhs, gemm, dtype, state.total_of(name))


def _warn_of_few_tokens(tokens: int, grad_weight: GemmSpec) -> None:
    lhs = grad_weight.lhs
    if tracing.is_compiling() or lhs is None or lhs.dtype.is_floating_point or tokens >= FEW_TOKENS:
        return
    warn_once(
        "few tokens",
        f"{lhs.dtype} gradients of weights from {tokens} tokens a batch: fewer than {FEW_TOKENS} average little of "
        "the rounding noise, and are too few to be fast; leave grad_weight in full precision, or enlarge the batch",
    )


def operands_of(
    lhs: Tensor, rhs: Tensor | Operand, name: str, gemm: GemmSpec, state: ContractionState
) -> tuple[Operand, Operand]:
    """Both operands of a matmul, quantized, where rhs is not yet; the rows of lhs are independent."""
    if isinstance(rhs, Operand):
        return quantize_operand(lhs, gemm.lhs, gemm.blocks[1], True, f"{name}.lhs", state), rhs
    if not state.active:
        observed(lhs, f"{name}.lhs", gemm.lhs, state)
        observed(rhs, f"{name}.rhs", gemm.rhs, state)
        return Operand(lhs, lhs.shape[0]), Operand(rhs, rhs.shape[0])
    if gemm.changes_operands:
        lhs, rhs = transformed(*balanced(lhs, rhs, gemm.mid_alpha), gemm.hadamard)
    left, right = gemm.blocks
    if gemm.fold == "lhs":
        rhs, a = with_scale_in(rhs, quantize_operand(lhs, gemm.lhs, right, False, f"{name}.lhs", state))
        return a, quantize_operand(rhs, gemm.rhs, left, False, f"{name}.rhs", state)
    b = quantize_operand(rhs, gemm.rhs, left, False, f"{name}.rhs", state)
    if gemm.fold == "rhs":
        lhs, b = with_scale_in(lhs, b)
    a = quantize_operand(lhs, gemm.lhs, right, True, f"{name}.lhs", state)
    return (unbiased(lhs, a, gemm.hadamard), unbiased(rhs, b, gemm.hadamard)) if gemm.eden and gemm.hadamard else (a, b)


def _values(w: Tensor) -> Tensor | Operand:
    """The floats of a weight; or the codes of one that has these alone."""
    return w.operand() if hasattr(w, "operand") else _floats(w)


def _floats(w: Tensor) -> Tensor:
    return w.floats() if isinstance(w, QuantizedTensor) else w  # type: ignore[attr-defined]


# What is large in one operand is moved into the other one before both are quantized. Balanced operands:
#
#     c[a, b] = sum_c (lhs[a, c] / m[c]) (rhs[b, c] m[c]),   m[c] = max_a |lhs[a, c]|^alpha / max_b |rhs[b, c]|^beta
#
# The product stays the same; outliers along the contracted axis are shared by the two operands, as SmoothQuant (Xiao
# et al., arXiv 2211.10438, eq. 4) does it with fixed weights, here on each call (AQT, `mid_quant`). A maximum of zero
# counts as one.


def balanced(lhs: Tensor, rhs: Tensor, alphas: tuple[float, float] | None) -> tuple[Tensor, Tensor]:
    """`lhs` (A, C) and `rhs` (B, C), balanced by (alpha, beta); as they are for None."""
    if alphas is None:
        return lhs, rhs
    factor = _largest(lhs) ** alphas[0] / _largest(rhs) ** alphas[1]
    return (lhs / factor).to(lhs.dtype), (rhs * factor).to(rhs.dtype)


def _largest(x: Tensor) -> Tensor:
    """Of each contracted index, (1, C), fp32. A token that is not finite must not reach the other tokens."""
    magnitude = torch.where(x.isfinite().all(1, keepdim=True), x.abs(), 0).float()
    largest = magnitude.amax(0, keepdim=True) if x.shape[0] else magnitude.new_zeros(1, x.shape[1])
    return torch.where(largest > 0, largest, 1.0)


def transformed(lhs: Tensor, rhs: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
    """The random Hadamard transform of operands (A, C) and (B, C), along the contracted axis, by blocks of `size`:

        sum_c lhs[a, c] rhs[b, c] = sum_c (lhs D H)[a, c] (rhs D H)[b, c],   D = diag(+-1), H = sylvester(size)

    D is drawn on each call, H D D H = I. An outlier is spread over its block, and by the signs no fixed pattern of the
    operands meets a row of H (NVIDIA's NVFP4 training, arXiv 2509.25149, section 4.2). Zeros complete the last block.
    """
    if size is None:
        return lhs, rhs
    matrix = sylvester(size, lhs.device, torch.float32)
    lhs, rhs = (block_mm.pad_to_blocks(x.float(), granularity.PerGroup(size)) for x in (lhs, rhs))
    signs = 1 - 2 * (torch.rand_like(lhs[:1]) < 0.5).float()
    return rotate_blocks(lhs * signs, matrix), rotate_blocks(rhs * signs, matrix)


def unbiased(x: Tensor, operand: Operand, size: int) -> Operand:
    """`operand`, codes of the transformed `x` (A, C), with other scales, of which its mean over transforms is x:

        x_hat = SR(S scale) q,    S = sum x^2 / sum x (scale q)    over the `size` elements transformed together

    S undoes what rounding to nearest takes from, or adds to, the length of x, and SR rounds to the format of scales
    stochastically: noise is drawn for a block, not for each element (MS-EDEN of Quartet II, Panferov et al.,
    arXiv 2601.22813; EDEN, Vargaftik et al., arXiv 2108.08842).
    """
    spec, scale = operand.spec, operand.scale
    assert spec is not None
    assert spec.scale_spec is not None
    assert scale is not None
    groups, own = x.unflatten(1, (-1, size)), operand.dequantize(torch.float32).unflatten(1, (-1, size))
    along = (groups * own).sum(2)
    factor = torch.where(along == 0, 1.0, groups.square().sum(2) / along)
    scale = scale.float() * factor.repeat_interleave(size // spec.granularity.pattern(2)[1], 1)
    lost, at_random = ~scale.isfinite(), replace(spec.scale_spec, rounding=Rounding.STOCHASTIC)
    codes = double_quant.quantize_scale(torch.where(lost, 0, scale), at_random)
    return operand._replace(scale=torch.where(lost, torch.nan, double_quant.dequantize_scale(codes, at_random)))


def with_scale_in(x: Tensor, operand: Operand) -> tuple[Tensor, Operand]:
    """The scale (1, C) of `operand`, one for each contracted index, multiplied into the other operand `x`:
    sum_c x (q s) = sum_c (x s) q. Other scales stay where they are."""
    assert operand.spec is not None
    assert operand.scale is not None
    if operand.spec.granularity.pattern(2) != (-1, 1):
        return x, operand
    scaled = as_long_as(x, operand) * operand.scale.amax(0, keepdim=True).to(torch.float32)
    spec = operand.spec.with_granularity(granularity.granularity_of((-1, -1)))
    return scaled, operand._replace(scale=torch.ones_like(operand.scale[:1, :1]), spec=spec)


# How the gradient of an operand as it is multiplied becomes that of its values.
#
# An operand is multiplied as x_hat = s q, s = max |x| / Q, q = round(x / s). Passing rounding straight through, with s
# held fixed, dL/dx = dL/dx_hat. With s a function of x, the elements of largest magnitude in a block also get
#
#     dL/ds ds/dx,   dL/ds = sum_block dL/dx_hat (q - x / s),   ds/dx = sign(x) / (Q c)
#
# with c the number of elements that share the maximum (Esser et al., arXiv 1902.08153, eq. 3, for dL/ds). Where a scale
# leaves elements outside the codes, these may get no gradient instead.


class OperandGradient(NamedTuple):
    """dL/dx from dL/dx_hat: straight through, unless there is `scale`, the spec of x whose scale passes a gradient on,
    or `unclipped`, a mask of the elements that get a gradient."""

    scale: QuantSpec | None = None
    unclipped: Tensor | None = None

    def __call__(self, grad: Tensor | None, x: Tensor) -> Tensor | None:
        if grad is not None and self.scale is not None:
            grad = with_scale_gradient(grad, x, self.scale)
        return grad if grad is None or self.unclipped is None else torch.where(self.unclipped, grad, 0)

    @classmethod
    def of(cls, x: Tensor, operand: Operand, spec: QuantSpec | None, training: TrainingSpec) -> OperandGradient:
        """That of an operand of the forward, which `spec` has made of `x`."""
        unclipped = where_unclipped(x, operand) if training.clip_gradient else None
        return cls(spec if training.scale_gradient else None, unclipped)


STRAIGHT_THROUGH = OperandGradient()


def with_scale_gradient(grad: Tensor, x: Tensor, spec: QuantSpec) -> Tensor:
    """dL/dx from `grad` = dL/dx_hat, both of the shape of the matrix `x`; the equation above."""
    values = block_mm.pad_to_blocks(x, spec.granularity)
    extra = (0, values.shape[1] - x.shape[1], 0, values.shape[0] - x.shape[0])
    view = granularity.BlockView(values.shape, spec.block_size(values.shape))
    scale, _ = spec.choose_qparams(values)
    q = view.split(spec.dtype.decode(spec.to_nearest().quantize(values, scale, None)))
    s, v, g = view.split_scale(scale).float(), view.split(values).float(), view.split(pad(grad, extra)).float()
    magnitude = v.abs()
    largest = magnitude == magnitude.amax(view.dims, keepdim=True)
    low, high = spec.code_range
    of_scale = (g * (q - v / s)).sum(view.dims, keepdim=True) / ((high - low) / 2)
    result = g + of_scale * torch.sign(v) * largest / largest.sum(view.dims, keepdim=True)
    return view.merge(result)[: x.shape[0], : x.shape[1]].to(grad.dtype)


def where_unclipped(x: Tensor, operand: Operand) -> Tensor | None:
    """Whether x / s lies within the bounds of the codes, for each element of the matrix `x` that `operand` is made of;
    None: it was not quantized."""
    spec, scale = operand.spec, operand.scale
    if spec is None or scale is None:
        return None
    low, high = spec.code_range
    padded = pad(x, (0, operand.values.shape[1] - x.shape[1], 0, operand.values.shape[0] - x.shape[0]))
    view = granularity.BlockView(padded.shape, granularity.block_of(padded.shape, scale.shape))
    s, z = view.split_scale(scale), affine.split_zero_point(view, operand.zero_point)
    codes = affine.real_codes(view.split(padded.float()), s, z, spec.dtype, (low, high), spec.zero_point_domain)
    return view.merge((codes >= low) & (codes <= high))[: x.shape[0], : x.shape[1]]
