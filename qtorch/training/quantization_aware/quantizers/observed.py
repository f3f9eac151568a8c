"""Quantizers whose scales come from values: of each call, of the past, or given."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ....calibration.observers import Observer
from ....kernels.ops.quantize_rowwise import without_lost_rows
from ....primitives import QuantSpec
from ....primitives.qparams import min_max
from ....primitives.scale_rules import elements_last
from ....statistics import Statistic
from ..fake_quantize import clips
from .base import MinMax, Quantizer, mean_of_ranks, mean_over_ranks


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
    def is_static(self) -> bool:
        return True

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
            blocks, shape = elements_last(rows, self.spec)
            if blocks.numel():
                measured = mean_over_ranks(self.observer.measure(blocks)).unflatten(1, shape)
                memory, extremes = self.observer.follow_measured(self.memory, measured)
                self.memory.copy_(memory)
                self._set_range(extremes)
            return
        batch = mean_of_ranks(min_max(rows, self.spec.block_size(rows.shape)))
        self._set_range(self.observer.follow((self.min_val, self.max_val), batch))

    def _set_range(self, extremes: MinMax) -> None:
        self.min_val.copy_(extremes[0])
        self.max_val.copy_(extremes[1])
