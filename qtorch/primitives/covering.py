"""Scales of weights that are updated in codes: no value may lie beyond the outermost codes.

Stochastic rounding is unbiased between two codes. What lies beyond the last one becomes that at every update: the range
of a block would shrink, and its largest value could not grow. So a scale here is at least

    max(max / (last - zero), min / (first - zero)),    zero the code of 0.0, first and last the outermost codes,

rounded up to the number in which it is kept. A block whose largest value has the outermost code keeps its scale, and an
update of nothing changes nothing. So do the scales of NVFP4, since the scale that they share is a power of two.
"""

from dataclasses import replace

import torch
from torch import Tensor

from . import double_quant, floatx
from .affine import MappingType, ZeroPointDomain, quotient
from .codebooks import CodebookSpec
from .rotated_spec import RotatedSpec
from .scale_rules import MinMaxRule
from .spec import QuantSpec

_TOLERANCE = 2.0**-20
"""Relative, of a scale that counts as large enough: a product of codes and scales in fp32 may be so far off."""


def why_no_update(spec: QuantSpec | CodebookSpec) -> str | None:
    """Why weights quantized by `spec` cannot be updated in codes, a clause of an error; None if they can."""
    if type(spec) not in (QuantSpec, RotatedSpec, CodebookSpec):
        return f"a {type(spec).__name__} has no stochastic rounding; take a QuantSpec, or a CodebookSpec with a table"
    domain, scales = getattr(spec, "zero_point_domain", ZeroPointDomain.NONE), spec.scale_spec
    first, last = spec.ends if isinstance(spec, CodebookSpec) else spec.code_range
    zero = (first + last + 1) // 2 if spec.has_zero_point else 0.0
    reasons = {
        f"takes codes of 2 to 8 bits, got {spec.dtype}": not 2 <= spec.dtype.bits <= 8,
        f"zero points that are real numbers ({domain.name}) do not hold still; take INT": domain.is_real,
        "k-means would fit tables anew at each update; give a table": getattr(spec, "table", ()) is None,
        "scales in integers would all move when one does; take scales that are not quantized": scales is not None
        and not scales.dtype.has_nan,
        f"has no code on the other side of zero: {first:g} to {last:g}": not first < zero < last,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def covering_qparams(
    spec: QuantSpec | CodebookSpec, input: Tensor, scale_dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Scales as the top of the file says, in the form of `QuantSpec.choose_stored_qparams`, and the zero point if there
    is one, whatever the rule for scales and the mapping of `spec`. `scale_dtype` is that of scales that are not
    quantized themselves."""
    smallest = torch.finfo(torch.float32 if spec.scale_spec else scale_dtype).tiny
    eps, zero_point = max(smallest, spec.eps or 0.0), None
    if isinstance(spec, CodebookSpec):
        scale = replace(spec, scale_dtype=torch.float32, scale_spec=None, eps=eps).choose_scale(input)
    else:
        exact = replace(spec, scale_dtype=torch.float32, scale_spec=None, eps=eps, scale_rule=MinMaxRule())
        if spec.mapping is not MappingType.ASYMMETRIC:
            exact = replace(exact, mapping=MappingType.SYMMETRIC_NO_CLIPPING_ERR, preserve_max_val=True)
        low, high = exact.choose_range(input)
        scale, zero_point = exact.choose_qparams_from_range(low, high)
        if spec.mapping is MappingType.ASYMMETRIC and zero_point is not None:
            # Of the zero point, rounded, and the code on either side, that with the smallest scale.
            (first, last), below, above = spec.code_range, -low.clamp(max=0), high.clamp(min=0)
            zeros = torch.stack([(zero_point.float() + step).clamp(first, last) for step in (-1, 0, 1)])
            below, above = torch.where(below == 0, 0, below / (zeros - first)), above / (last - zeros)
            scale, index = torch.maximum(below, torch.where(high <= 0, 0, above)).min(0, keepdim=True)
            scale, zero_point = scale[0].clamp(min=eps), zeros.gather(0, index)[0].to(zero_point.dtype)
    if spec.scale_spec is None:
        return {"scale": _rounded_up(scale, scale_dtype)}, zero_point
    groups = double_quant.in_groups(scale.reshape(-1), spec.scale_spec)
    least = quotient(torch.where(groups.isfinite(), groups, 0).amax(1, keepdim=True), spec.scale_spec.code_range[1])
    power = floatx.floor_to_power_of_two(least.clamp(min=smallest))
    power = torch.where(power < least, power * 2, power)
    codes = _rounded_up(groups / power, spec.scale_spec.dtype.storage).reshape(-1)[: scale.numel()]
    return {"scale": codes.reshape(scale.shape), "scale_scale": power.reshape(-1)}, zero_point


def _rounded_up(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale` (fp32, positive) in `dtype`: the next number that is not below it, within the tolerance."""
    made = scale.clamp(max=torch.finfo(dtype).max).to(dtype)
    bits = made.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
    return (bits + (made.float() < scale * (1 - _TOLERANCE))).view(dtype)
