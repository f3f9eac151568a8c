"""How the gradient of an operand as it is multiplied becomes that of its values.

An operand is multiplied as x_hat = s q, s = max |x| / Q, q = round(x / s). Passing rounding straight through, with s
held fixed, dL/dx = dL/dx_hat. With s a function of x, the elements of largest magnitude in a block also get

    dL/ds ds/dx,   dL/ds = sum_block dL/dx_hat (q - x / s),   ds/dx = sign(x) / (Q c)

with c the number of elements that share the maximum (Esser et al., arXiv 1902.08153, eq. 3, for dL/ds). Where a scale
leaves elements outside the codes, these may get no gradient instead.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.ops.block_mm import pad_to_blocks
from ...primitives import QuantSpec, affine, granularity
from .operand import Operand


class OperandGradient(NamedTuple):
    """dL/dx from dL/dx_hat: straight through, unless there is `scale`, the spec of x whose scale passes a gradient on,
    or `unclipped`, a mask of the elements that get a gradient."""

    scale: QuantSpec | None = None
    unclipped: Tensor | None = None

    def __call__(self, grad: Tensor | None, x: Tensor) -> Tensor | None:
        if grad is not None and self.scale is not None:
            grad = with_scale_gradient(grad, x, self.scale)
        return grad if grad is None or self.unclipped is None else torch.where(self.unclipped, grad, 0)


STRAIGHT_THROUGH = OperandGradient()


def with_scale_gradient(grad: Tensor, x: Tensor, spec: QuantSpec) -> Tensor:
    """dL/dx from `grad` = dL/dx_hat, both of the shape of the matrix `x`; the equation above."""
    values = pad_to_blocks(x, spec.granularity)
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
