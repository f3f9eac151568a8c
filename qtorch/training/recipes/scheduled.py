"""Training by a spec of your own, from some step on, with ranges that are kept from step to step."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...calibration.statistics import Statistics
from ...kernels.registry import from_rows, to_rows
from ...model.targets import Target
from ...primitives import QuantSpec, qdtype, tracing
from ...recipes.base import check_has_values, register_recipe
from ..engine import functional, numerics
from ..engine.contraction import contraction
from ..engine.gemm_spec import TrainingSpec
from ..engine.operand import ContractionState, quantize_operand
from ..quantization_aware import converted, quantizers
from ..quantization_aware.layers import Prepared, TrainedConv, TrainedLayer, of_each_conv, table_of
from ..quantization_aware.recipes.base import LayerRecipe
from ..quantization_aware.schedule import QuantizationSchedule, Schedule
from ..weights.base import of_codes
from .base import check_trainable


class ScheduledContraction(Schedule, ContractionState):
    """The state of one contraction: its step, and the ranges of its static operands, made when they are first seen. The
    count is also a Python number: reading a buffer of a device would wait for it. It stops one after the last step
    that the schedule names, since a compiled graph holds for one number."""

    repeats = False

    def __init__(self, schedule: QuantizationSchedule) -> None:
        super().__init__(schedule.start_step, schedule.freeze_step)
        self.schedule, self.static = schedule, schedule.static
        self.ranges = nn.ModuleDict()
        self.steps = 0
        self.is_used = False

    @property
    def active(self) -> bool:  # type: ignore[override]
        return not self.training or self.of_pass(self.steps) >= self.start_step

    def observes(self, operand: str) -> bool:
        follows = self.freeze_step is None or self.of_pass(self.steps) < self.freeze_step
        return self.training and follows and not (operand.startswith("output.") and tracing.in_backward())

    def of_pass(self, step: int) -> int:
        return step if self.is_used else super().of_pass(step)  # one that is used is not counted yet

    def count(self) -> None:
        super().count()
        self.steps = self._until_last(self.steps + 1)

    def _until_last(self, step: int) -> int:
        return min(step, 1 + max(self.start_step, self.freeze_step or 0))

    def range_of(self, operand: str, x: Tensor, spec: QuantSpec) -> quantizers.ObservedRange | None:
        if operand not in self.static:
            return None
        key = operand.replace(".", "_")
        if key not in self.ranges:
            self._add(key, spec, spec.scale_shape(x.shape), x.device)
        static = self.ranges[key]
        assert isinstance(static, quantizers.ObservedRange)
        static.spec = spec
        return static

    def is_known(self, operand: str) -> bool:
        """Whether an operand is dynamic, or its range is known."""
        static: Any = dict(self.ranges.items()).get(operand.replace(".", "_"))
        return operand not in self.static or (static is not None and static.is_ready)

    def _add(self, key: str, spec: QuantSpec, shape: Any, device: torch.device) -> None:
        made = quantizers.ObservedRange(spec, shape, False, self.schedule.following)
        self.ranges[key] = made.to(device).train(self.training)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        for key in (name.replace(".", "_") for name in self.static):
            extreme = state_dict.get(f"{prefix}ranges.{key}.min_val")
            if extreme is not None and key not in self.ranges:
                # The spec is that of the contraction, which comes with its next call.
                self._add(key, QuantSpec(qdtype("int8")), extreme.shape, extreme.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.steps = self._until_last(int(self.step))

    def extra_repr(self) -> str:
        return repr(self.schedule)


@tracing.outside_graphs("the ranges of static operands follow what passes, outside of graphs")
def _with_ranges(x: Tensor, w: Tensor, spec: TrainingSpec, state: ScheduledContraction) -> Tensor:
    """`contraction` with ranges that follow: Dynamo has an internal error, another one in each torch, where an autograd
    function makes or changes buffers."""
    return contraction(x, w, spec, state)


class ScheduledLayer(TrainedLayer):
    """Base of the layers whose contraction has a schedule."""

    added = ("training_spec", "contraction_state")

    training_spec: TrainingSpec
    contraction_state: ScheduledContraction

    def advance(self) -> None:
        self.contraction_state.advance()

    def contract(self, rows: Tensor, matrix: Tensor) -> Tensor:
        run = _with_ranges if self.contraction_state.static else contraction
        return run(rows, matrix, self.training_spec, self.contraction_state)

    def check_convert(self) -> None:
        self.training_spec.check_convert()
        state, spec = self.contraction_state, self.training_spec.output
        for name, operand in (("lhs", spec.lhs), ("rhs", spec.rhs)):
            if operand is not None and not state.is_known(f"output.{name}"):
                raise ValueError(f"no data has been seen, so the range of output.{name} is not known: train first")

    @torch.no_grad()
    def convert(self) -> Tensor:
        """The weight as the forward multiplies it in eval mode, with the scale of a static input."""
        spec, linear = self.training_spec.output, self.training_spec.linear_spec
        if spec.rhs is None or linear is None:
            return self.weight.detach()
        state = self.contraction_state.eval()
        weight = self.matrix.detach()
        codes, _, scale, zero_point, _ = quantize_operand(weight, spec.rhs.to_nearest(), 1, False, "output.rhs", state)
        assert scale is not None
        activation: dict[str, Tensor | None] = {}
        if spec.lhs is not None and "output.lhs" in state.static:
            of_input = state.range_of("output.lhs", weight[:1], spec.lhs)
            assert of_input is not None
            act_scale, act_zero_point = of_input.qparams(weight, False)
            activation = {"act_scale": act_scale, "act_zero_point": act_zero_point}
            linear = replace(linear, static=True)
        return of_codes(codes, scale, zero_point, linear, weight.dtype, **activation)


class ScheduledLinear(ScheduledLayer, nn.Linear):
    """`nn.Linear` in training."""

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        converted.check_width(input, weight)
        return from_rows(self.contract(to_rows(input), weight), input, bias)


class ScheduledConv(TrainedConv, ScheduledLayer):
    """Base of the convolutions."""

    @classmethod
    def check(cls, module: nn.Module) -> None:
        if module.padding_mode != "zeros":
            raise ValueError(f"pads with {module.padding_mode!r}; a scheduled convolution pads with zeros")
        if module.groups != 1:
            raise ValueError(f"has {module.groups} groups, whose products would share the ranges of one")

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        sizes: tuple[Any, ...] = (self.stride, self.padding, self.dilation)
        return functional.conv_by(self.contract, weight.dim() - 2, input, weight, bias, *sizes)


ScheduledConv1d, ScheduledConv2d, ScheduledConv3d = of_each_conv(ScheduledConv)


@register_recipe("scheduled_training")
class ScheduledTraining(LayerRecipe):
    """`nn.Linear` and convolutions, exactly these, train by `spec` as `schedule` says. Weights stay in floating point
    and plain; what the schedule needs is in the layers, whose class is exchanged until `convert()`.

    Args:
        spec: of the three matmuls.
        schedule: when they are quantized, and which operands are static.

    Raises:
        ValueError: static operands that the spec does not quantize, or with a scale for each token.
    """

    layers = table_of(ScheduledLinear, ScheduledConv1d, ScheduledConv2d, ScheduledConv3d)
    hint = ". inject(spec) takes any contraction"

    spec: TrainingSpec = numerics.fully_quantized()
    schedule: QuantizationSchedule = QuantizationSchedule()

    def __post_init__(self) -> None:
        self.schedule.check(self.spec)

    def check(self, weight: Tensor) -> None:
        check_trainable(weight)
        check_has_values(weight, self)  # so has the count of steps
        if self.spec.output.rhs is not None:
            self.spec.output.rhs.block_size(weight.shape)

    def check_target(self, target: Target[Any]) -> None:
        super().check_target(target)
        if len(target.slots) > 1:
            raise ValueError("is shared by several modules, which would have a schedule each")

    def has_made(self, target: Target[Any]) -> bool:
        return all(
            isinstance(m, ScheduledLayer)
            and m.training_spec == self.spec
            and m.contraction_state.schedule == self.schedule
            for m in target.modules
        )

    def make(self, target: Target[Any], weight: Tensor, statistics: Statistics | None = None) -> Prepared:
        state = ScheduledContraction(self.schedule).to(weight.device)
        return Prepared(weight, weight.nbytes, {"training_spec": self.spec, "contraction_state": state})
