"""Quantizers whose scales are learned by gradient descent: LSQ, LSQ+, PACT; and learned clipping of weights."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...calibration.statistics import Statistic
from ...kernels.ops.quantize import without_lost_rows
from ...model.install import QuantizationState, check_model
from ...primitives import MappingType, QuantSpec, learned_step_fake_quantize, lsq_grad_scale, tracing
from .quantizers import Quantizer, mean_over_ranks

EMPTY = 1e-30
"""Scales below it are those of blocks that are all zero."""


class RuleRanges(Statistic):
    """The range that the scale rule of `spec` finds in each piece of data, of the shape of the scale."""

    lists = ("ranges",)

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__()
        self.spec = spec
        self.ranges: list[Tensor] = []

    def update(self, rows: Tensor) -> None:
        self.ranges.append(torch.stack(self.spec.choose_range(without_lost_rows(rows, self.spec))))
        self.rows += len(rows)


class LearnedQuantizer(Quantizer):
    """Base of the two: gradients of scale and zero point by `primitives.learned_step`.

    Args:
        scale_dtype: of the scales of the converted weight.
        through_rounding: False is the gradient of PACT: only what clips moves the scale.
        count: N of the gradient scale; None is the elements of one example.
    """

    def __init__(
        self, spec: QuantSpec, shape: Sequence[int], freezes: bool = False, scale_dtype: torch.dtype = torch.float32,
        through_rounding: bool = True, count: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(spec, shape, freezes)
        self.scale_dtype, self.through_rounding, self.count = scale_dtype, through_rounding, count

    def x_hat(self, x: Tensor, scale: Tensor, zero_point: Tensor | None, frozen: Tensor | None = None) -> Tensor:
        spec = self.spec
        # The rest of the factor depends on the zero point: see `qparams`.
        factor = lsq_grad_scale(self.count or x.numel() // max(x.shape[0], 1), 1)
        block, codes = spec.block_size(x.shape), (spec.dtype, spec.quant_min, spec.quant_max)
        return learned_step_fake_quantize(
            x, block, scale, zero_point, *codes, grad_scale=factor, through_rounding=self.through_rounding
        )


class LearnedStep(LearnedQuantizer):
    """Scales, and zero points, that are learned: LSQ (arXiv 1902.08153), LSQ+ (arXiv 2004.09576), PACT (1805.06085).

        s = s0 exp(log_scale),   z = (z0 - shift) s0 / s       (the offset of LSQ+ is -z s = s0 (shift - z0))

    with s0 and z0, buffers, where learning starts; both parameters start at zero. So a step cannot become negative
    (as in TQT, arXiv 1903.08066), a step of Adam is relative to it, and before training the scales are exactly those of
    quantization after training. The gradients that the parameters get are

        dL/dlog_scale = g (dL/ds) / s,   dL/dshift = -g (dL/dz) / (s s0),   g = 1 / sqrt(N Q_P)

    with which plain gradient descent moves s by -lr g dL/ds and the offset by -lr g dL/doffset, to first order: the
    update of the papers, with the paper's gradient scale.

    Args:
        offset: learn the zero point too. Otherwise, where the spec has one, it is fixed by the first data: the lowest
            code if nothing is negative (the codes are those of an unsigned type), the middle one if something is.
        options: of `LearnedQuantizer`.
    """

    is_static = True

    initial_scale: Tensor
    initial_zero_point: Tensor | None

    def __init__(
        self, spec: QuantSpec, shape: Sequence[int], freezes: bool = False, *, offset: bool = False, **options: Any
    ) -> None:
        super().__init__(spec, shape, freezes, **options)
        self.offset, shape = offset, tuple(shape)
        zeros = torch.zeros(shape, dtype=torch.float32, device="cpu")
        self.register_buffer("initial_scale", torch.full_like(zeros, math.nan))
        self.register_buffer("initial_zero_point", zeros.clone() if spec.has_zero_point else None)
        self.log_scale = nn.Parameter(zeros.clone())
        self.register_parameter("shift", nn.Parameter(zeros) if offset else None)

    @property
    def is_ready(self) -> bool:
        return not bool(self.initial_scale.isnan().any())

    def new_statistic(self) -> Statistic:
        return RuleRanges(self.spec)

    @torch.no_grad()
    def set_observed(self, seen: RuleRanges) -> None:
        self.start(*self._qparams_from_range(*torch.stack(seen.ranges).mean(0)))

    def _qparams_from_range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
        spec = self.spec
        if not spec.has_zero_point or self.offset:
            return spec.choose_qparams_from_range(low, high, self.scale_dtype)
        first, last = spec.code_range
        unsigned = low >= 0
        span = torch.where(unsigned, high, 2 * torch.maximum(-low, high))
        return span / (last - first), torch.where(unsigned, float(first), float(int((first + last + 1) / 2)))

    @torch.no_grad()
    def start(self, scale: Tensor, zero_point: Tensor | None = None, where: Tensor | None = None) -> None:
        """Learn from this scale and zero point on; the blocks where `where` is true, or all."""
        where = torch.ones_like(self.initial_scale, dtype=torch.bool) if where is None else where
        scale = _of_blocks_with_values(scale.float(), self.spec.code_range[1])
        self.initial_scale.copy_(torch.where(where, scale, self.initial_scale))
        if self.initial_zero_point is not None and zero_point is not None:
            self.initial_zero_point.copy_(torch.where(where, zero_point.float(), self.initial_zero_point))
        for parameter in self.parameters():
            parameter.masked_fill_(where, 0.0)
        self._known_ready = True

    def codes_above_zero(self, zero_point: Tensor | None) -> Tensor:
        """Q_P."""
        high = self.spec.code_range[1]
        above = torch.full_like(self.initial_scale, high) if zero_point is None else high - zero_point
        return above.clamp(min=1)

    def largest(self) -> Tensor:
        """The real that the highest code stands for; its gradient is the chain rule's. PACT's a."""
        return self.codes_above_zero(self.initial_zero_point) * self.initial_scale * self.log_scale.exp()

    def qparams(self, x: Tensor, observe: bool) -> tuple[Tensor, Tensor | None]:
        if not observe:
            self.check_ready()
        elif not self._known_ready:
            extremes = self.spec.choose_range(without_lost_rows(x.detach(), self.spec))
            # A state that was loaded into the buffers is kept.
            self.start(*self._qparams_from_range(*mean_over_ranks(torch.stack(extremes))), self.initial_scale.isnan())
        zero_point = self.initial_zero_point
        root = self.codes_above_zero(zero_point).sqrt()
        start = (self.log_scale, self.shift, self.initial_scale, zero_point)
        made = tracing.apply(_LearnedQParams, *start, root, self.scale_dtype)
        return (made, zero_point) if self.shift is None else made


class LearnedClip(LearnedQuantizer):
    """The range of the weight as it is, its ends times factors that are learned (learned weight clipping, Shao et al.,
    arXiv 2308.13137, eq. 2, with factors exp(log_clip), which start at 1, in place of a sigmoid).

        symmetric    s = c max|w| / ((Qp - Qn) / 2)
        asymmetric   s = (c_high max(w) - c_low min(w)) / (Qp - Qn),   z = Qn - c_low min(w) / s

    Scales follow the weight; before training they are those of quantization after training. The gradient of a factor is
    the chain rule's, times 1 / sqrt(N).
    """

    log_clip_low: Tensor | None

    def __init__(self, spec: QuantSpec, shape: Sequence[int], freezes: bool = False, **options: Any) -> None:
        super().__init__(spec, shape, freezes, **options)
        zeros = torch.zeros(tuple(shape), dtype=torch.float32, device="cpu")
        self.log_clip = nn.Parameter(zeros)
        asymmetric = spec.mapping is MappingType.ASYMMETRIC
        self.register_parameter("log_clip_low", nn.Parameter(zeros.clone()) if asymmetric else None)

    def qparams(self, x: Tensor, observe: bool) -> tuple[Tensor, Tensor | None]:
        spec = self.spec
        low, high = spec.choose_range(x.detach())
        of_high = self.log_clip.exp()
        of_low = of_high if self.log_clip_low is None else torch.exp(self.log_clip_low)
        low, high = low.clamp(max=0) * of_low, high.clamp(min=0) * of_high
        scale, zero_point = spec.choose_qparams_from_range(low, high, self.scale_dtype)
        if zero_point is not None and self.log_clip_low is not None:
            zero_point = (spec.code_range[0] - low / scale.float()).clamp(*spec.code_range)
        return scale.float(), zero_point


def _of_blocks_with_values(scale: Tensor, high: float) -> Tensor:
    """Blocks of zeros start with the mean scale of the others: with one of their own they could not grow."""
    empty = scale < EMPTY
    count = (~empty).sum()
    mean = torch.where(empty, 0.0, scale).sum() / count.clamp(min=1)
    return torch.where(empty, torch.where(count > 0, mean, 1 / max(high, 1)), scale)


class _LearnedQParams(torch.autograd.Function):
    """s of `LearnedStep`, `root` being sqrt(Q_P); with a `shift`, s and z. As -z s is held, z depends on s."""

    @staticmethod
    def forward(
        ctx: Any, log_scale: Tensor, shift: Tensor | None, initial: Tensor, initial_zero_point: Tensor | None,
        root: Tensor, dtype: torch.dtype,
    ) -> Any:  # fmt: skip
        limits = torch.finfo(dtype)
        scale = (initial * torch.exp(log_scale)).clamp(limits.tiny, limits.max).to(dtype).float()
        scale = scale.view_as(scale)  # see `_LearnedStep`
        if shift is None or initial_zero_point is None:
            ctx.save_for_backward(scale, root)
            return scale
        zero_point = (initial_zero_point - shift) * (initial / scale)
        ctx.save_for_backward(scale, root, zero_point, initial)
        return scale, zero_point

    @staticmethod
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale, root, *of_shift = ctx.saved_tensors
        if not of_shift:
            return grad_outputs[0] / (root * scale), None, None, None, None, None
        zero_point, initial = of_shift
        of_scale, of_zero_point = (grad / root for grad in grad_outputs)
        of_log_scale = (of_scale - of_zero_point * zero_point / scale) / scale
        return of_log_scale, -of_zero_point / (scale * initial), None, None, None, None


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, scale_lr: float | None = None
) -> list[dict[str, Any]]:
    """Groups for an optimizer: the parameters of the model, and, if there are any, those that quantization has added.

    A step is learned as a logarithm (`LearnedStep`): a step of Adam with `scale_lr` changes it by that share.

    Args:
        lr, weight_decay: of the model's own parameters.
        scale_lr: of learned scales and offsets, `lr` by default; their weight decay is zero.
    """
    check_model("parameter_groups", model)
    learned = {
        id(parameter): parameter
        for module in model.modules()
        if isinstance(module, QuantizationState)
        for parameter in module.parameters()
    }
    own = [parameter for parameter in model.parameters() if id(parameter) not in learned]
    groups: list[dict[str, Any]] = [{"params": own, "lr": lr, "weight_decay": weight_decay}]
    if learned:
        rate = lr if scale_lr is None else scale_lr
        groups.append({"params": list(learned.values()), "lr": rate, "weight_decay": 0.0})
    return groups
