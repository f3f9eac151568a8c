"""Quantizers whose scales come from values: of each call, of the past, or given."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ....kernels.ops.quantize_rowwise import without_lost_rows
from ....primitives import QuantSpec
from ..fake_quantize import clips
from .base import Quantizer, mean_of_ranks


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
            self._observe(*mean_of_ranks(self.choose_range(x)))
        else:
            self.check_ready()
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
