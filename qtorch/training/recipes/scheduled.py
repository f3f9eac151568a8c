"""Training by a spec of your own, from some step on, with ranges that are kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...calibration.statistics import Statistics
from ...dtypes.conv import ConvWeight
from ...dtypes.dispatch import cast_for_product
from ...dtypes.linear import check_input
from ...kernels.conv import to_matrix
from ...kernels.registry import from_rows, to_rows
from ...model.install import PreparedModule
from ...model.targets import Target
from ...model.weight_kinds import WeightKind
from ...primitives import QuantSpec, qdtype
from ...primitives.tracing import outside_graphs, refuse_jit_trace
from ...recipes.base import Recipe, check_has_values, register_recipe
from ..engine.contraction import contraction
from ..engine.convolutions import conv_by
from ..engine.gemm_spec import TrainingSpec
from ..engine.numerics import fully_quantized
from ..engine.operand import quantize_operand
from ..quantization_aware.quantizers import ObservedRange
from ..quantization_aware.schedule import QuantizationSchedule, Schedule
from ..weights.base import of_codes
from .base import check_trainable

# --------------------------------------------------------------------------------------------------
# The state of a contraction with a schedule: its step, and the ranges of its static operands.


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


# --------------------------------------------------------------------------------------------------
# Layers whose contraction has a schedule: their class is exchanged, and `convert()` gives it back.


@outside_graphs("the ranges of static operands follow what passes, outside of graphs")
def _with_ranges(x: Tensor, w: Tensor, spec: TrainingSpec, state: ScheduledContraction) -> Tensor:
    """`contraction` with ranges that follow: Dynamo has an internal error, another one in each torch, where an autograd
    function makes or changes buffers."""
    return contraction(x, w, spec, state)


class ScheduledLayer(PreparedModule):
    """Base of the layers.

    Attributes:
        training_spec: of the three matmuls.
        contraction_state: the step, and the ranges of static operands.
    """

    weight: Tensor
    bias: Any
    training_spec: TrainingSpec
    contraction_state: ScheduledContraction

    @classmethod
    def prepare(cls, module: nn.Module, spec: TrainingSpec, schedule: QuantizationSchedule) -> None:
        """Exchange the class of `module`, and put the state into it."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module.training_spec = spec
        module.contraction_state = ScheduledContraction(schedule).to(module.weight.device).train(module.training)

    def restore(self) -> None:
        del self.training_spec, self.contraction_state
        super().restore()

    def forward(self, input: Tensor) -> Tensor:
        refuse_jit_trace()
        check_input(f"a {type(self).float_class.__name__} in training", input, self.weight)
        y = cast_for_product(self.product, input, self.weight, self.bias)
        if self.training:
            self.contraction_state.advance()
        return y

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`forward` outside autocast."""
        raise NotImplementedError

    def contract(self, rows: Tensor, matrix: Tensor) -> Tensor:
        run = _with_ranges if self.contraction_state.schedule.static else contraction
        return run(rows, matrix, self.training_spec, self.contraction_state)

    @property
    def matrix(self) -> Tensor:
        """The weight as a matrix (N, K)."""
        return self.weight

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
        if spec.lhs is not None and "output.lhs" in state.schedule.static:
            of_input = state.range_of("output.lhs", weight[:1], spec.lhs)
            assert of_input is not None
            act_scale, act_zero_point = of_input.qparams(weight, False)
            activation = {"act_scale": act_scale, "act_zero_point": act_zero_point}
            linear = replace(linear, static=True)
        return of_codes(codes, scale, zero_point, linear, weight.dtype, **activation)


class ScheduledLinear(ScheduledLayer, nn.Linear):
    """`nn.Linear` in training."""

    float_class = nn.Linear

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not input.dim() or input.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"linear: an input of shape {tuple(input.shape)} does not fit a weight of shape {tuple(weight.shape)}"
            )
        return from_rows(self.contract(to_rows(input), weight), input, bias)


class ScheduledConv(ScheduledLayer):
    """Convolutions in training."""

    stride: Any
    padding: Any
    dilation: Any
    groups: int
    kernel_size: tuple[int, ...]

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        sizes = (self.stride, self.padding, self.dilation, self.groups)

        def product(rows: Tensor, matrix: Tensor, group: int) -> Tensor:
            return self.contract(rows, matrix)

        return conv_by(product, len(self.kernel_size), input, weight, bias, *sizes)

    @property
    def matrix(self) -> Tensor:
        return to_matrix(self.weight)

    def convert(self) -> Tensor:
        made = super().convert()
        return made if made is self.weight or made.dim() != 2 else ConvWeight.of(made, self.weight.shape)  # type: ignore[arg-type]


class ScheduledConv1d(ScheduledConv, nn.Conv1d):
    """`nn.Conv1d` in training."""

    float_class = nn.Conv1d


class ScheduledConv2d(ScheduledConv, nn.Conv2d):
    """`nn.Conv2d` in training."""

    float_class = nn.Conv2d


class ScheduledConv3d(ScheduledConv, nn.Conv3d):
    """`nn.Conv3d` in training."""

    float_class = nn.Conv3d


LAYERS: dict[type[nn.Module], type[ScheduledLayer]] = {
    cls.float_class: cls for cls in (ScheduledLinear, ScheduledConv1d, ScheduledConv2d, ScheduledConv3d)
}
"""What each float module becomes."""


def layer_for(module: nn.Module) -> type[ScheduledLayer]:
    """The class that stands in for that of `module`.

    Raises:
        ValueError: none does, or a convolution that pads with other values than zeros, or whose groups share a range.
    """
    cls = LAYERS.get(type(module))
    if cls is None:
        names = ", ".join(f"nn.{kind.__name__}" for kind in LAYERS)
        raise ValueError(
            f"takes the weights of {names}, exactly these; this is one of {type(module).__name__}. inject(spec) takes "
            "any contraction"
        )
    if getattr(module, "padding_mode", "zeros") != "zeros":
        raise ValueError(f"pads with {module.padding_mode!r}; a scheduled convolution pads with zeros")
    if getattr(module, "groups", 1) != 1:
        raise ValueError(f"has {module.groups} groups, whose products would share the ranges of one")
    return cls


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
