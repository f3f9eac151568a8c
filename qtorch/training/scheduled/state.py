"""The state of a contraction with a schedule: its step, and the ranges of its static operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...primitives import QuantSpec, qdtype
from ..quantization_aware.quantizers.observed import ObservedRange
from ..quantization_aware.schedule import QuantizationSchedule, Schedule


class ScheduledContraction(Schedule):
    """The state of one contraction: its step, and the ranges of its static operands, made when they are first seen.

    The count is also a Python number: reading a buffer of a device would wait for it.
    """

    def __init__(self, schedule: QuantizationSchedule) -> None:
        super().__init__(schedule.start_step, schedule.freeze_step)
        self.schedule = schedule
        self.ranges = nn.ModuleDict()
        self.steps = 0
        self.is_used = False

    @property
    def active(self) -> bool:  # type: ignore[override]
        return not self.training or self.steps >= self.start_step

    @property
    def observes(self) -> bool:
        """Whether ranges follow what passes."""
        return self.training and (self.freeze_step is None or self.steps < self.freeze_step)

    def count(self) -> None:
        super().count()
        self.steps += 1

    def range_of(self, operand: str, x: Tensor, spec: QuantSpec) -> ObservedRange | None:
        """The range of an operand whose values, padded to whole blocks, are `x`; None if its scale is dynamic."""
        if operand not in self.schedule.static:
            return None
        key = operand.replace(".", "_")
        if key not in self.ranges:
            self._add(key, spec, spec.scale_shape(x.shape), x.device)
        static = self.ranges[key]
        assert isinstance(static, ObservedRange)
        static.spec = spec
        return static

    def total_of(self, product: str) -> None:
        """Products are whole."""

    def is_known(self, operand: str) -> bool:
        """Whether an operand is dynamic, or its range is known."""
        static: Any = dict(self.ranges.items()).get(operand.replace(".", "_"))
        return operand not in self.schedule.static or (static is not None and static.is_ready)

    def _add(self, key: str, spec: QuantSpec, shape: Any, device: torch.device) -> None:
        made = ObservedRange(spec, shape, False, self.schedule.following)
        self.ranges[key] = made.to(device).train(self.training)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        for key in (name.replace(".", "_") for name in self.schedule.static):
            extreme = state_dict.get(f"{prefix}ranges.{key}.min_val")
            if extreme is not None and key not in self.ranges:
                # The spec is that of the contraction, which comes with its next call.
                self._add(key, QuantSpec(qdtype("int8")), extreme.shape, extreme.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.steps = int(self.step)

    def extra_repr(self) -> str:
        return repr(self.schedule)
