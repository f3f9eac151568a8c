"""Layers in training: modules of torch whose class is exchanged until `convert()`, with what training adds in them.

`TrainedLayer` is the base of all of them. Those here have a quantizer for the weight, and one for the input:

    y = product(x_hat, w_hat) + bias

The value is what the converted layer computes (`converted_linear`), bit for bit where it sums integers; the gradient is
that of the float product of the fake-quantized operands.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...calibration.data import Data, run_batches
from ...dtypes import ConvWeight, QuantizedTensor, dispatch, linear, quantized_type
from ...dtypes.conv import CONVS, convolution
from ...kernels.conv import Window, from_matrix, to_matrix
from ...model.install import PreparedModule, check_model
from ...primitives import LinearSpec, MappingType, PerAxis, PerRow, PerTensor, QuantSpec, ZeroPointDomain, tracing
from ..weights.base import of_codes
from .converted import sums_integers
from .fake_quantize import FakeQuantized, fake_quantized_conv, fake_quantized_linear
from .quantizers import Quantizer
from .schedule import Schedule


class Prepared(NamedTuple):
    """What a recipe has made for the layers of a weight: the weight as it is quantized, the bytes of weight and state,
    and the attributes `TrainedLayer.added`."""

    values: Tensor
    nbytes: int
    added: Mapping[str, Any]

    def dequantize(self) -> Tensor:
        """For the report."""
        return self.values


class TrainedLayer(PreparedModule):
    """Base of the layers in training. Another kind of layer is a subclass with a `product`, whose last base is the
    class of torch that it stands in for (`float_class`), and an entry in the table of its recipe.

    Attributes:
        added: names of the attributes that training adds.
    """

    added: ClassVar[tuple[str, ...]]

    weight: Tensor
    bias: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__bases__[-1].__module__.startswith("torch."):
            cls.float_class = cls.__bases__[-1]

    def forward(self, input: Tensor) -> Tensor:
        tracing.refuse_jit_trace()
        linear.check_input(f"a {type(self).float_class.__name__} in training", input, self.weight)
        y = dispatch.cast_for_product(self.product, input, self.weight, self.bias)
        if self.training:
            self.advance()
        return y

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`forward` outside autocast, which casts the input and the bias and nothing else."""
        raise NotImplementedError

    def advance(self) -> None:
        """Count a pass in training mode, after it."""

    @classmethod
    def check(cls, module: nn.Module) -> None:
        """Raise `ValueError` where a `float_class` cannot be prepared."""

    @classmethod
    def prepare(cls, module: nn.Module, added: Mapping[str, Any]) -> None:
        """Exchange the class of `module`, and put the state into it. Layers with a weight in common share quantizers,
        and count their steps each for itself."""
        module.__class__ = cls
        for name in cls.added:
            value = added[name]
            setattr(module, name, copy.deepcopy(value) if isinstance(value, Schedule) else value)
        module.train(module.training)

    def restore(self) -> None:
        for name in self.added:
            delattr(self, name)
        super().restore()

    @classmethod
    def to_matrix(cls, module: nn.Module, weight: Tensor) -> Tensor:
        """`weight` of `module` as it is quantized: a matrix whose rows are the output features; differentiable."""
        return weight

    @classmethod
    def from_matrix(cls, module: nn.Module, matrix: Tensor, shape: torch.Size) -> Tensor:
        """Inverse of `to_matrix`, for a weight of this shape."""
        return matrix

    @property
    def matrix(self) -> Tensor:
        return self.to_matrix(self, self.weight)


class TrainedConv(TrainedLayer):
    """Base of the convolutions in training."""

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    padding_mode: Any

    @classmethod
    def to_matrix(cls, module: nn.Module, weight: Tensor) -> Tensor:
        return to_matrix(weight)

    @classmethod
    def from_matrix(cls, module: nn.Module, matrix: Tensor, shape: torch.Size) -> Tensor:
        return from_matrix(matrix, shape).contiguous()

    def convert(self) -> Tensor:
        made = super().convert()
        return ConvWeight.of(made, self.weight.shape) if isinstance(made, QuantizedTensor) else made


Layers = dict[type[nn.Module], type[TrainedLayer]]
"""What each float module becomes."""


def table_of(*layers: type[TrainedLayer]) -> Layers:
    """The table of these layers."""
    return {layer.float_class: layer for layer in layers}


def layer_for(module: nn.Module, layers: Layers, hint: str = "") -> type[TrainedLayer]:
    """The class that stands in for that of `module`, or `ValueError`. A subclass may have a forward of its own."""
    kind = type(module)
    if kind not in layers:
        names = ", ".join(f"nn.{each.__name__}" for each in layers)
        raise ValueError(f"takes the weights of {names}, exactly these; this is one of {kind.__qualname__}{hint}")
    layers[kind].check(module)
    return layers[kind]


class FakeQuantizedLayer(TrainedLayer):
    """Base of the layers with quantizers; a subclass has the forward of its `float_class`."""

    added = ("recipe", "linear_spec", "weight_quantizer", "input_quantizer", "schedule")

    recipe: Any
    linear_spec: LinearSpec
    weight_quantizer: Quantizer
    input_quantizer: Quantizer | None
    schedule: Schedule | None

    @property
    def frozen(self) -> Tensor | None:
        """Whether scales are held; see `Schedule`."""
        return None if self.schedule is None else self.schedule.frozen

    @property
    def product_dtype(self) -> torch.dtype | None:
        return None

    @property
    def precedes_windows(self) -> bool:
        quantizer = self.input_quantizer
        return quantizer is None or quantizer.is_static or quantizer.spec.granularity == PerAxis(0)

    def quantize_input(self, rows: Tensor) -> FakeQuantized:
        if self.input_quantizer is None:
            return FakeQuantized(rows)
        return self._scheduled(self.input_quantizer(rows, self.frozen, self._multiplies_codes), rows)

    def quantize_weight(self, matrix: Tensor) -> FakeQuantized:
        return self._scheduled(self.weight_quantizer(matrix, self.frozen, self._multiplies_codes), matrix)

    def weight_values(self, matrix: Tensor) -> Tensor:
        """`matrix` fake-quantized, for what reads it and multiplies nothing; differentiable."""
        return self._scheduled(self.weight_quantizer(matrix, self.frozen), matrix).values

    @property
    def _multiplies_codes(self) -> bool:
        """Whether products are those of codes: not while `calibrate` looks at the input in floating point, nor where a
        schedule mixes floats and fake-quantized operands."""
        observes = self.input_quantizer is not None and self.input_quantizer.observed is not None
        return sums_integers(self.linear_spec) and not observes and not (self.training and self.schedule is not None)

    def _scheduled(self, quantized: FakeQuantized, values: Tensor) -> FakeQuantized:
        if self.schedule is None or not self.training:
            return quantized
        return FakeQuantized(torch.where(self.schedule.active, quantized.values, values))

    def advance(self) -> None:
        if self.schedule is not None:
            self.schedule.advance()

    def check_convert(self) -> None:
        if self.input_quantizer is not None and not self.input_quantizer.is_ready:
            raise ValueError("no input has been seen, so its scale is not known: train, or calibrate(model, batches)")
        if not bool(torch.isfinite(self.matrix.detach()).all()):
            raise ValueError("the weight has values that are NaN or infinite")

    @torch.no_grad()
    def convert(self) -> Tensor:
        """The weight quantized by the scales that the forward uses in eval mode, in the layout of the spec."""
        frozen, weight, spec = self.frozen, self.matrix.detach(), self.linear_spec
        activation: dict[str, Tensor | None] = {}
        if spec.static:
            assert self.input_quantizer is not None
            spec, activation = _static(spec, *self.input_quantizer.converted_qparams(weight[:1], frozen))
        if not isinstance(spec.weight, QuantSpec) or spec.weight.scale_spec is not None:
            return quantized_type(spec.weight).from_float(weight, spec)
        scale, zero_point = self.weight_quantizer.converted_qparams(weight, frozen)
        codes = spec.weight.quantize(weight, scale, zero_point)
        if isinstance(spec.weight.granularity, PerTensor) and sums_integers(spec):
            # Kernels that sum integers read a scale for each row.
            spec = replace(spec, weight=spec.weight.with_granularity(PerRow()))
        return of_codes(codes, scale, zero_point, spec, weight.dtype, **activation)


def _static(spec: LinearSpec, scale: Tensor, zero_point: Tensor | None) -> tuple[LinearSpec, dict[str, Tensor | None]]:
    """The spec of the converted layer for a fixed activation scale, and the tensors of that scale. Where int8 has room
    for it, the zero point becomes part of the bounds of the codes: products without one are faster, and their integers
    the same."""
    activation = spec.activation
    assert activation is not None
    if zero_point is not None and not activation.dtype.is_floating_point:
        shift, (low, high) = int(zero_point), activation.code_range
        if activation.dtype.quant_min <= low - shift and high - shift <= activation.dtype.quant_max:
            zero_point = None
            activation = replace(
                activation, mapping=MappingType.SYMMETRIC, zero_point_domain=ZeroPointDomain.NONE,
                quant_min=low - shift, quant_max=high - shift,
            )  # fmt: skip
    return replace(spec, activation=activation), {"act_scale": scale, "act_zero_point": zero_point}


class FakeQuantizedLinear(FakeQuantizedLayer, nn.Linear):
    """`nn.Linear` in training."""

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return fake_quantized_linear(input, weight, bias, self)


class FakeQuantizedEmbedding(FakeQuantizedLayer, nn.Embedding):
    """`nn.Embedding` in training: rows of the fake-quantized table."""

    @classmethod
    def check(cls, module: nn.Module) -> None:
        if module.sparse:
            raise ValueError("an embedding with sparse=True has no dense gradient to learn from")

    def forward(self, input: Tensor) -> Tensor:
        tracing.refuse_jit_trace()
        values = self.weight_values(self.weight)
        if self.training:
            self.advance()
        return nn.functional.embedding(input, values, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)


class FakeQuantizedConv(TrainedConv, FakeQuantizedLayer):
    """Base of the convolutions. An input with one scale is quantized first, and its codes are gathered. Where scales
    are dynamic, each window has one of its own, and is quantized after it is gathered, as in inference."""

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            ends: Any = self._reversed_padding_repeated_twice
            input, padding = nn.functional.pad(input, ends, mode=self.padding_mode), 0
        ndim = weight.dim() - 2

        def run(input: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
            return self.convolve(input, window, bias)

        conv = convolution(ndim, f"conv{ndim}d", run)
        return conv(input, weight, bias, self.stride, padding, self.dilation, self.groups)

    def convolve(self, input: Tensor, window: Window, bias: Tensor | None) -> Tensor:
        """The convolution of the fake-quantized operands."""
        return fake_quantized_conv(input, self.matrix, bias, self, window)


def of_each_conv(base: type[Any]) -> list[type[Any]]:
    """`base` with each of torch's convolutions; for pickles, these have their names in the file of `base`."""
    return [
        type(f"{base.__name__}{conv.__name__[-2:]}", (base, conv), {"__module__": base.__module__}) for conv in CONVS
    ]


FakeQuantizedConv1d, FakeQuantizedConv2d, FakeQuantizedConv3d = of_each_conv(FakeQuantizedConv)

LAYERS = table_of(
    FakeQuantizedLinear, FakeQuantizedEmbedding, FakeQuantizedConv1d, FakeQuantizedConv2d, FakeQuantizedConv3d
)


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Any]) -> int:
    """Run `model` in eval mode on each batch, with the inputs of its layers in floating point, and start the scales of
    these inputs: observed ones where their observer says, learned ones from the mean of the ranges that their scale
    rule finds in the batches.

    Scales that training has moved start anew. In several processes all see their own batches and start alike. Before
    `fully_shard`: the parameters of a sharded model are not there to be set.

    Args:
        batches: a mapping is given as keyword arguments, a tuple or list as arguments, all else as the only one.

    Returns:
        The number of quantizers that have been started.

    Raises:
        ValueError: the model has no input with a static scale, or there is no batch.
    """
    check_model("calibrate", model)
    layers = [module for module in model.modules() if isinstance(module, FakeQuantizedLayer)]
    inputs = dict.fromkeys(layer.input_quantizer for layer in layers)
    quantizers = [quantizer for quantizer in inputs if quantizer is not None and quantizer.is_static]
    if not quantizers:
        raise ValueError("calibrate: no layer of the model is prepared with static scales of its input")
    for quantizer in quantizers:
        quantizer.observed = quantizer.new_statistic()

    def end_batch() -> None:
        for quantizer in quantizers:
            if quantizer.observed is not None:
                quantizer.observed.end_batch()

    try:
        run_batches(model, Data(batches), end_batch)
    except BaseException:
        for quantizer in quantizers:
            quantizer.observed = None
        raise
    return sum(quantizer.end_observation() for quantizer in quantizers)
