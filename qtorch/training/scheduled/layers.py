"""Layers whose contraction has a schedule: their class is exchanged, and `convert()` gives it back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...dtypes.autocast import cast_for_product
from ...dtypes.conv_weight import ConvWeight
from ...dtypes.linear import check_input
from ...kernels.im2col import to_matrix
from ...kernels.rows import from_rows, to_rows
from ...prepared_module import PreparedModule
from ...tracing.outside_graphs import outside_graphs, refuse_jit_trace
from ..engine.contraction import contraction
from ..engine.conv import conv_by
from ..engine.operand import quantize_operand
from ..engine.spec import TrainingSpec
from ..quantization_aware.schedule import QuantizationSchedule
from ..weights.base import of_codes
from .state import ScheduledContraction


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
