"""Fake quantizers with state: the modules by which a layer in training quantizes its weight and its input.

    Dynamic        scale and zero point from the values of each call; no state
    ObservedRange  from a range that is observed: a moving average, or the extremes
    LearnedStep    learned: LSQ, LSQ+, PACT

Each has a `QuantSpec`, and gives with x_hat the scale and zero point that will be served. Their parameters and buffers
are fp32, in models of any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..prepared_module import QuantizationState
from ..primitives import QuantSpec, fake_quantize_affine, learned_step_fake_quantize, lsq_grad_scale
from ..primitives.learned_step import zero_point_code

MinMax = tuple[Tensor, Tensor]


class FakeQuantized(NamedTuple):
    """x_hat, differentiable, and what gives its codes: `spec.quantize(x, scale, zero_point)`; scale None where x_hat is
    x itself."""

    values: Tensor
    scale: Tensor | None = None
    zero_point: Tensor | None = None


class Quantizer(QuantizationState):
    """Base of the quantizers.

    Args:
        spec: how; its scale rule gives the range of a tensor.
        shape: of the scale.
        freezes: it may be asked to hold its scales; see `forward`.
    """

    held_scale: Tensor | None
    held_zero_point: Tensor | None

    def __init__(self, spec: QuantSpec, shape: Sequence[int], freezes: bool = False) -> None:
        super().__init__()
        self.spec = spec
        # Ranges of batches, while `calibrate` looks at data.
        self.observed: list[MinMax] | None = None
        held = torch.full(tuple(shape), math.nan)
        self.register_buffer("held_scale", held if freezes else None)
        self.register_buffer("held_zero_point", held.clone() if freezes and spec.has_zero_point else None)

    def qparams(self, x: Tensor, observe: bool) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point, of the shape of the scale; differentiable in what is learned.

        Args:
            observe: learn from `x` what is learned by looking.
        """
        raise NotImplementedError

    @property
    def is_static(self) -> bool:
        """Whether scales are kept from call to call."""
        return False

    @property
    def is_ready(self) -> bool:
        """Whether there is a scale; static ones need data first."""
        return True

    def set_range(self, low: Tensor, high: Tensor) -> None:
        """Start from this range of reals, of the shape of the scale."""

    def end_observation(self) -> bool:
        """Start from the mean of the ranges that were observed; whether there were any."""
        observed, self.observed = self.observed, None
        if not observed:
            return False
        self.set_range(*mean_of_ranks(_mean(observed)))
        return True

    def forward(self, x: Tensor, frozen: Tensor | None = None) -> FakeQuantized:
        """Fake-quantize `x`.

        Args:
            frozen: a boolean of no dimensions; where it is true, the scales are those of the last call in training when
                it was not. None: they never are.
        """
        if self.observed is not None:
            self.observed.append(self.spec.calibrate(x.detach()))
            return FakeQuantized(x)
        scale, zero_point = self._held_or(self.qparams(x, self.training), frozen)
        if self.training and frozen is not None and self.held_scale is not None:
            with torch.no_grad():
                self.held_scale.copy_(scale)
                if zero_point is not None and self.held_zero_point is not None:
                    self.held_zero_point.copy_(zero_point)
        return FakeQuantized(self.fake_quantize(x, scale, zero_point), scale, self._code(zero_point))

    @torch.no_grad()
    def served(self, x: Tensor, frozen: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point as `forward` in eval mode has them, in the dtypes in which they are stored beside codes
        of `x`."""
        scale, zero_point = self._held_or(self.qparams(x, observe=False), frozen)
        dtype = self.spec.stored_scale_dtype(x.dtype)
        zero_point = self._code(zero_point)
        if zero_point is not None and zero_point.is_floating_point():
            zero_point = zero_point.to(dtype)
        return scale.to(dtype), zero_point

    def _held_or(self, qparams: tuple[Tensor, Tensor | None], frozen: Tensor | None) -> tuple[Tensor, Tensor | None]:
        scale, zero_point = qparams
        if frozen is None or self.held_scale is None:
            return scale, zero_point
        scale = torch.where(frozen, self.held_scale, scale.float())
        if zero_point is not None and self.held_zero_point is not None:
            zero_point = torch.where(frozen, self.held_zero_point, zero_point.float())
        return scale, zero_point

    def _code(self, zero_point: Tensor | None) -> Tensor | None:
        if zero_point is None or self.spec.zero_point_domain.name == "FLOAT":
            return zero_point
        return zero_point_code(zero_point.detach().float(), *self.spec.code_range).to(self.spec.dtype.storage)

    def fake_quantize(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """x_hat by these."""
        spec = self.spec
        block = spec.block_size(x.shape)
        return fake_quantize_affine(
            x, block, scale, zero_point, spec.dtype, spec.quant_min, spec.quant_max, spec.zero_point_domain
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves; but `.to(torch.bfloat16)` leaves scales in fp32."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    def extra_repr(self) -> str:
        return str(self.spec)


class Dynamic(Quantizer):
    """Scale and zero point from the values of each call, as the scheme chooses them when it serves."""

    def qparams(self, x: Tensor, observe: bool) -> tuple[Tensor, Tensor | None]:
        return self.spec.choose_qparams(x.detach())


class ObservedRange(Quantizer):
    """Scale and zero point from the range of what has passed in training.

    Args:
        momentum: of a moving average, r <- r + momentum (range of the batch - r); None for the extremes of all batches.
    """

    min_val: Tensor
    max_val: Tensor

    def __init__(
        self, spec: QuantSpec, shape: Sequence[int], freezes: bool = False, momentum: float | None = 0.01
    ) -> None:
        super().__init__(spec, shape, freezes)
        self.momentum = momentum
        self.register_buffer("min_val", torch.full(tuple(shape), math.nan))
        self.register_buffer("max_val", torch.full(tuple(shape), math.nan))

    @property
    def is_static(self) -> bool:
        return True

    @property
    def is_ready(self) -> bool:
        return not bool(self.min_val.isnan().any())

    def set_range(self, low: Tensor, high: Tensor) -> None:
        self.min_val.copy_(low)
        self.max_val.copy_(high)

    def qparams(self, x: Tensor, observe: bool) -> tuple[Tensor, Tensor | None]:
        if observe:
            self._observe(*mean_of_ranks(self.spec.calibrate(x.detach())))
        return self.spec.choose_qparams_from_range(self.min_val, self.max_val)

    @torch.no_grad()
    def _observe(self, low: Tensor, high: Tensor) -> None:
        if self.momentum is None:
            self.set_range(torch.fmin(self.min_val, low), torch.fmax(self.max_val, high))
            return
        first = self.min_val.isnan()
        self.set_range(
            torch.where(first, low, torch.lerp(self.min_val, low, self.momentum)),
            torch.where(first, high, torch.lerp(self.max_val, high, self.momentum)),
        )


class LearnedStep(Quantizer):
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
        scale_dtype: that scales are served in.
        through_rounding: False is the gradient of PACT: only what clips moves the scale.
        count: N; None is the elements of one example.
    """

    initial_scale: Tensor
    initial_zero_point: Tensor | None

    def __init__(
        self,
        spec: QuantSpec,
        shape: Sequence[int],
        freezes: bool = False,
        *,
        offset: bool = False,
        scale_dtype: torch.dtype = torch.float32,
        through_rounding: bool = True,
        count: int | None = None,
    ) -> None:
        super().__init__(spec, shape, freezes)
        shape = tuple(shape)
        self.offset, self.scale_dtype, self.through_rounding, self.count = offset, scale_dtype, through_rounding, count
        self.register_buffer("initial_scale", torch.full(shape, math.nan))
        self.register_buffer("initial_zero_point", torch.zeros(shape) if spec.has_zero_point else None)
        self.log_scale = nn.Parameter(torch.zeros(shape))
        self.register_parameter("shift", nn.Parameter(torch.zeros(shape)) if offset else None)
        self._started = False

    @property
    def is_static(self) -> bool:
        return True

    @property
    def is_ready(self) -> bool:
        return not bool(self.initial_scale.isnan().any())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._started = not self.initial_scale.is_meta and self.is_ready

    @torch.no_grad()
    def set_range(self, low: Tensor, high: Tensor) -> None:
        spec, zero_point = self.spec, None
        if spec.has_zero_point and not self.offset:
            first, last = spec.code_range
            unsigned = low >= 0
            span = torch.where(unsigned, high, 2 * torch.maximum(-low, high))
            scale = (span / (last - first)).clamp(min=torch.finfo(torch.float32).tiny)
            zero_point = torch.where(unsigned, float(first), float(int((first + last + 1) / 2)))
        else:
            scale, zero_point = spec.choose_qparams_from_range(low, high, self.scale_dtype)
        self.start(scale, zero_point)

    @torch.no_grad()
    def start(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Learn from this scale and zero point on."""
        self.initial_scale.copy_(scale)
        if self.initial_zero_point is not None and zero_point is not None:
            self.initial_zero_point.copy_(zero_point)
        for parameter in self.parameters():
            parameter.zero_()
        self._started = True

    def qparams(self, x: Tensor, observe: bool) -> tuple[Tensor, Tensor | None]:
        if not self._started:
            if not observe:
                raise ValueError("no scale yet: train on a batch, or call qtorch.training.calibrate(model, batches)")
            self.set_range(*mean_of_ranks(self.spec.calibrate(x.detach())))
        high, zero_point = self.spec.code_range[1], self.initial_zero_point
        above_zero = torch.full_like(self.initial_scale, high) if zero_point is None else high - zero_point
        root = above_zero.clamp(min=1).sqrt()
        if self.shift is None:
            return _LearnedScale.apply(self.log_scale, self.initial_scale, root, self.scale_dtype), zero_point
        scale, zero_point = _LearnedQParams.apply(
            self.log_scale, self.shift, self.initial_scale, zero_point, root, self.scale_dtype
        )
        return scale, zero_point

    def fake_quantize(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        spec = self.spec
        count = self.count or x.numel() // max(x.shape[0], 1)
        return learned_step_fake_quantize(
            x,
            spec.block_size(x.shape),
            scale,
            zero_point,
            spec.dtype,
            spec.quant_min,
            spec.quant_max,
            grad_scale=lsq_grad_scale(count, 1),  # the rest of it depends on the zero point: see `qparams`
            through_rounding=self.through_rounding,
        )


def _scale(log_scale: Tensor, initial: Tensor, dtype: torch.dtype) -> Tensor:
    limits = torch.finfo(dtype)
    scale = (initial * torch.exp(log_scale)).clamp(limits.tiny, limits.max)
    return scale.to(dtype).float()


class _LearnedScale(torch.autograd.Function):
    """s of `LearnedStep`, without an offset; `root` is sqrt(Q_P)."""

    @staticmethod
    def forward(ctx: Any, log_scale: Tensor, initial: Tensor, root: Tensor, dtype: torch.dtype) -> Tensor:
        scale = _scale(log_scale, initial, dtype)
        ctx.save_for_backward(scale, root)
        return scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale, root = ctx.saved_tensors
        return grad_outputs[0] / (root * scale), None, None, None


class _LearnedQParams(torch.autograd.Function):
    """s and z of `LearnedStep`. The offset -z s being held, z depends on s."""

    @staticmethod
    def forward(
        ctx: Any,
        log_scale: Tensor,
        shift: Tensor,
        initial: Tensor,
        initial_zero_point: Tensor,
        root: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        scale = _scale(log_scale, initial, dtype)
        zero_point = (initial_zero_point - shift) * (initial / scale)
        ctx.save_for_backward(scale, zero_point, initial, root)
        return scale, zero_point

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale, zero_point, initial, root = ctx.saved_tensors
        of_scale, of_zero_point = (grad / root for grad in grad_outputs)
        of_log_scale = (of_scale - of_zero_point * zero_point / scale) / scale
        return of_log_scale, -of_zero_point / (scale * initial), None, None, None, None


def _mean(ranges: list[MinMax]) -> MinMax:
    low, high = zip(*ranges, strict=True)
    return torch.stack(low).mean(0), torch.stack(high).mean(0)


def mean_of_ranks(extremes: MinMax) -> MinMax:
    """The mean over the processes that train together, so that all start alike."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return extremes
    both = torch.stack(extremes)
    dist.all_reduce(both)
    low, high = both / dist.get_world_size()
    return low, high
