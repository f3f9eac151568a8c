"""Quantizer: the module by which a layer in training quantizes its weight, or its input.

    Dynamic        scale and zero point from the values of each call
    Fixed          given
    ObservedRange  from a range that is observed: a moving average, or the extremes
    LearnedStep    learned; this one and the next are in `learned`
    LearnedClip    the share of the weight's range is learned

Each has a `QuantSpec`, and gives x_hat, its codes, and the scale and zero point of the converted layer. Their
parameters and buffers are fp32, in models of any dtype.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...calibration.observers import Observer
from ...calibration.statistics import Statistic
from ...kernels.ops.quantize import without_lost_rows
from ...model.install import QuantizationState
from ...primitives import QuantSpec, is_compiling, scale_rules, tracing
from ...primitives.fake_quant import zero_point_code
from ...primitives.qparams import min_max
from .fake_quantize import FakeQuantized, Scaled, clips, fake_quantize, straight_through_rounding


class Quantizer(QuantizationState):
    """Base of the quantizers.

    Attributes:
        is_static: whether scales are kept from call to call.

    Args:
        spec: of the codes. Its scale rule chooses the range of a tensor.
        shape: of the scale.
        freezes: whether scales can be held from some step on; see `forward`.
    """

    is_static: ClassVar[bool] = False

    held_scale: Tensor | None
    held_zero_point: Tensor | None

    def __init__(self, spec: QuantSpec, shape: Sequence[int], freezes: bool = False) -> None:
        super().__init__()
        self.spec = spec
        # What is seen, while `calibrate` looks at data.
        self.observed: Statistic | None = None
        self._known_ready = False
        held = torch.full(tuple(shape), math.nan, dtype=torch.float32, device="cpu")
        self.register_buffer("held_scale", held if freezes else None)
        self.register_buffer("held_zero_point", held.clone() if freezes and spec.has_zero_point else None)

    def qparams(self, x: Tensor, observe: bool) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point, of the shape of the scale; differentiable in what is learned.

        Args:
            observe: update observed ranges from `x`, and start learned scales from it if they have not started.
        """
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Whether there is a scale; static ones need data first."""
        return True

    def check_ready(self) -> None:
        """Raise `ValueError` if there is no scale yet. Not checked in compiled graphs, nor once there has been one."""
        if self._known_ready or is_compiling():
            return
        if not self.is_ready:
            raise ValueError("no scale yet: train on a batch, or call qtorch.training.calibrate(model, batches)")
        self._known_ready = True

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._known_ready = all(not t.is_meta for t in self.buffers()) and self.is_ready

    def new_statistic(self) -> Statistic:
        """What `calibrate` collects of x (M, K)."""
        raise NotImplementedError

    def set_observed(self, seen: Any) -> None:
        """Start from a `new_statistic` that has seen rows."""
        raise NotImplementedError

    def end_observation(self) -> bool:
        """Start from what was observed in all processes that train together. Returns whether there was anything."""
        assert self.observed is not None
        seen, self.observed = of_all_ranks(self.observed), None
        if seen.rows:
            self.set_observed(seen)
        return bool(seen.rows)

    def forward(self, x: Tensor, frozen: Tensor | None = None, multiplied: bool = False) -> FakeQuantized:
        """Fake-quantize `x` (rows, K).

        Args:
            frozen: a boolean of no dimensions; where it is true, the scales are those of the last call in training when
                it was not. None: they never are.
            multiplied: the product is one of codes.
        """
        if self.observed is not None:
            self.observed.update(x.detach())
            return FakeQuantized(x)
        # Activations that are computed again have the range of their forward.
        scale, zero_point = self._held_or(self.qparams(x, self.training and not tracing.in_backward()), frozen)
        if self.training and frozen is not None and self.held_scale is not None:
            with torch.no_grad():
                self.held_scale.copy_(scale)
                if zero_point is not None and self.held_zero_point is not None:
                    self.held_zero_point.copy_(zero_point)
        scaled = Scaled(self.spec, scale.detach(), self._code(zero_point))

        return fake_quantize(x.detach(), scaled, lambda: self.x_hat(x, scale, zero_point, frozen), multiplied)

    @torch.no_grad()
    def converted_qparams(self, x: Tensor, frozen: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point of `forward` in eval mode, in the dtypes in which the converted weight stores them."""
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
        if zero_point is None or self.spec.zero_point_domain.is_real:
            return zero_point
        return zero_point_code(zero_point.detach().float(), *self.spec.code_range).to(self.spec.dtype.storage)

    def x_hat(self, x: Tensor, scale: Tensor, zero_point: Tensor | None, frozen: Tensor | None = None) -> Tensor:
        """The reals that the codes of `x` stand for, with their gradient."""
        scaled = Scaled(self.spec, scale, zero_point)
        return straight_through_rounding(x, x.detach(), scaled, lambda mask: self.passes_gradient(mask, frozen))

    def passes_gradient(self, unclipped: Tensor, frozen: Tensor | None) -> Tensor | None:
        """A mask of the elements that get the gradient of x_hat; None for all."""
        return unclipped

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves tensors to devices; `.to(torch.bfloat16)` leaves scales in fp32."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    def extra_repr(self) -> str:
        return str(self.spec)


_group: Any = None


def average_ranges_over(group: Any) -> None:
    """Average ranges of static activations, and those from which learned scales start, over this process group, that of
    data parallelism: the stages of a pipeline have other layers. None, as at the start, is all processes."""
    global _group
    _group = group


def _ranks() -> int:
    return dist.get_world_size(_group) if dist.is_available() and dist.is_initialized() else 1


def of_all_ranks(seen: Statistic) -> Statistic:
    """What the processes that train together have seen, merged in their order."""
    if _ranks() <= 1:
        return seen
    parts: list[Any] = [None] * _ranks()
    dist.all_gather_object(parts, seen, _group)
    for other in parts[1:]:
        parts[0].merge(other)
    merged: Statistic = parts[0]
    return merged


def mean_over_ranks(values: Tensor) -> Tensor:
    """The mean over the processes that train together, so that all start alike."""
    if _ranks() <= 1:
        return values
    values = values.clone()
    dist.all_reduce(values, group=_group)
    return values / _ranks()


class Dynamic(Quantizer):
    """Scale and zero point from the values of each call, as in inference."""

    def qparams(self, x: Tensor, observe: bool) -> tuple[Tensor, Tensor | None]:
        values = x.detach()
        if isinstance(self.spec, QuantSpec):  # not a table
            values = without_lost_rows(values, self.spec)
        return self.spec.choose_qparams(values)

    def passes_gradient(self, unclipped: Tensor, frozen: Tensor | None) -> Tensor | None:
        # Where the scale covers its block, all elements get a gradient: see `clips`. A scale that is held may clip.
        if clips(self.spec):
            return unclipped
        return None if frozen is None else unclipped | ~frozen


class Fixed(Quantizer):
    """A symmetric scale that is given, for every call."""

    scale: Tensor

    def __init__(self, spec: QuantSpec, scale: Tensor) -> None:
        super().__init__(spec, scale.shape)
        self.register_buffer("scale", scale)

    def qparams(self, x: Tensor, observe: bool) -> tuple[Tensor, Tensor | None]:
        return self.scale, None


class ObservedRange(Quantizer):
    """Scale and zero point from a range that an observer chooses: from what `calibrate` shows it, and, where the
    observer follows, from each batch in training."""

    is_static = True

    min_val: Tensor
    max_val: Tensor
    memory: Tensor | None

    def __init__(self, spec: QuantSpec, shape: Sequence[int], freezes: bool, observer: Observer) -> None:
        super().__init__(spec, shape, freezes)
        self.observer = observer
        unknown = torch.full(tuple(shape), math.nan, dtype=torch.float32, device="cpu")
        self.register_buffer("min_val", unknown)
        self.register_buffer("max_val", unknown.clone())
        self.register_buffer("memory", unknown.new_zeros(observer.memory, *shape) if observer.memory else None)

    @property
    def is_ready(self) -> bool:
        return not bool(self.min_val.isnan().any())

    def new_statistic(self) -> Statistic:
        return self.observer.statistic()

    def set_observed(self, seen: Statistic) -> None:
        self._set_range(self.observer.range(seen, self.spec))

    def qparams(self, x: Tensor, observe: bool) -> tuple[Tensor, Tensor | None]:
        if observe and self.observer.follows:
            self._follow(x)
        else:
            self.check_ready()
        return self.spec.choose_qparams_from_range(self.min_val, self.max_val)

    @torch.no_grad()
    def _follow(self, x: Tensor) -> None:
        rows = without_lost_rows(x.detach(), self.spec)
        if self.memory is not None:
            blocks, shape = scale_rules.elements_last(rows, self.spec)
            if blocks.numel():
                measured = mean_over_ranks(self.observer.measure(blocks)).unflatten(1, shape)
                memory, extremes = self.observer.follow_measured(self.memory, measured)
                self.memory.copy_(memory)
                self._set_range(extremes)
            return
        low, high = mean_over_ranks(torch.stack(min_max(rows, self.spec.block_size(rows.shape))))
        self._set_range(self.observer.follow((self.min_val, self.max_val), (low, high)))

    def _set_range(self, extremes: tuple[Tensor, Tensor]) -> None:
        self.min_val.copy_(extremes[0])
        self.max_val.copy_(extremes[1])
