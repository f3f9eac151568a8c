"""Training by a spec of your own, from some step on, with ranges that are kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ...recipe import Recipe, check_has_values, register_recipe
from ...statistics import Statistics
from ...targets import Target
from ...weight_kinds import WeightKind
from ..engine.numerics import fully_quantized
from ..engine.spec import TrainingSpec
from ..quantization_aware.schedule import QuantizationSchedule
from ..recipes.base import check_trainable
from .layers import LAYERS, ScheduledLayer, layer_for


class _Made(NamedTuple):
    weight: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def dequantize(self) -> Tensor:
        return self.weight


@register_recipe("scheduled_training")
@dataclass(frozen=True)
class ScheduledTraining(Recipe):
    """`nn.Linear` and convolutions, exactly these, train by `spec` as `schedule` says. Weights stay in floating point
    and plain; what the schedule needs is in the layers, whose class is exchanged until `convert()`.

    Args:
        spec: of the three matmuls.
        schedule: when they are quantized, and which operands are static.

    Raises:
        ValueError: static operands that the spec does not quantize, or with a scale for each token.
    """

    trains: ClassVar[bool] = True

    spec: TrainingSpec = fully_quantized()
    schedule: QuantizationSchedule = QuantizationSchedule()

    def __post_init__(self) -> None:
        self.schedule.check(self.spec)

    def declines(self, kind: WeightKind) -> str | None:
        if kind.is_layer and not kind.is_transposed:
            return None
        return f"no weight of a layer of torch, and {self.name} exchanges the class of layers"

    def check(self, weight: Tensor) -> None:
        check_trainable(weight)
        check_has_values(weight, self)  # so has the count of steps
        if self.spec.output.rhs is not None:
            self.spec.output.rhs.block_size(weight.shape)

    def check_target(self, target: Target[Any]) -> None:
        for slot in target.slots:
            if type(slot.module) not in LAYERS.values():
                layer_for(slot.module)
        if len(target.slots) > 1:
            raise ValueError("is shared by several modules, which would have a schedule each")
        super().check_target(target)

    def has_made(self, target: Target[Any]) -> bool:
        return all(
            isinstance(m, ScheduledLayer)
            and m.training_spec == self.spec
            and m.contraction_state.schedule == self.schedule
            for m in target.modules
        )

    def make(self, target: Target[Any], weight: Tensor, statistics: Statistics | None = None) -> Any:
        return _Made(weight)

    def install(self, target: Target[Any], made: Any) -> None:
        for module in target.modules:
            layer_for(module).prepare(module, self.spec, self.schedule)


scheduled_training = ScheduledTraining
