"""Scales alone are trained, the codes are fixed: the second phase of EfficientQAT (Chen et al., arXiv 2407.11062, 3.3).

w = (codes - zero_point) s,   s = s0 exp(log_scale),   dL/dlog_scale = sum over the block of dL/dw w
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ....calibration.statistics import Statistics
from ....dtypes import AffineQuantizedTensor, linear
from ....kernels.ops.quantize import dequantize_rows, quantize_input
from ....kernels.registry import from_rows, to_rows
from ....model.install import QuantizationState, keep_attributes
from ....model.targets import Target
from ....primitives import tracing
from ....primitives.granularity import BlockView
from ....recipes.base import WeightRecipe, check_has_values, register_recipe
from .. import layers
from .base import LayerRecipe, check_inference_recipe


@register_recipe("train_scales")
@dataclass(frozen=True)
class TrainScales(LayerRecipe):
    """Weights of `nn.Linear`, exactly, are stored as codes, as in inference, and their scales are trained. Whatever
    else has a gradient, norms say, trains with them, unless `model.requires_grad_(False)` comes first.

    Args:
        recipe: for inference, by which weights in floating point are quantized first. Weights that are quantized
            already, by `gptq` or by `qat` and `convert()`, are taken as they are, where `recipe` is None or a mapping
            names them.

    Raises:
        TypeError: `recipe` is not an inference recipe.
    """

    recipe: WeightRecipe | None = None

    def __post_init__(self) -> None:
        if self.recipe is not None:
            check_inference_recipe(self.recipe, self.name)

    @property
    def selects(self) -> tuple[type, ...]:  # type: ignore[override]
        return (AffineQuantizedTensor,) if self.recipe is None else ()

    def check(self, weight: Tensor) -> None:
        check_has_values(weight, self)
        if not isinstance(weight, AffineQuantizedTensor):
            if self.recipe is None:
                raise ValueError("is in floating point; name what quantizes it: train_scales(int4_weight_only())")
            self.recipe.check(weight)
        scheme = weight.scheme.spec if isinstance(weight, AffineQuantizedTensor) else self.recipe.linear_spec()  # type: ignore[union-attr]
        spec, scales = scheme.weight, getattr(scheme.layout, "tensors", ("scale",))
        narrow = "scale" not in scales or (getattr(spec, "scale_dtype", None) or torch.float32).itemsize == 1
        if narrow or getattr(spec, "scale_spec", None) is not None or getattr(spec, "rotation", 0):
            raise ValueError(f"{self.name} takes affine codes with scales in 16 or 32 bits, this is {scheme}")
        if spec.zero_point_domain.adds_zero_point:
            raise ValueError(f"{self.name} takes zero points that scale with the codes, this is {spec}")

    def has_made(self, target: Target[Any]) -> bool:
        return all(isinstance(module, ScaledLinear) for module in target.modules)

    def make(self, target: Target[Any], weight: Tensor, statistics: Statistics | None = None) -> Tensor:
        if isinstance(weight, AffineQuantizedTensor):
            return weight
        assert self.recipe is not None
        return self.recipe.apply(weight)

    def install(self, target: Target[Any], made: Any) -> None:
        scales = LearnedScales(made.scale)
        for module in target.modules:
            module.weight = keep_attributes(nn.Parameter(made, requires_grad=False), target.parameter)
            ScaledLinear.prepare(module, {"scales": scales})


class LearnedScales(QuantizationState):
    """The parameter of a weight, in fp32, of the shape of its scale."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros_like(scale, dtype=torch.float32))


class ScaledLinear(layers.TrainedLayer, nn.Linear):
    """`nn.Linear` whose weight has fixed codes; see the top of the file."""

    added = ("scales",)

    scales: LearnedScales
    weight: Any

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return from_rows(tracing.apply(_ScaledProduct, to_rows(input), self.scales.log_scale, weight), input, bias)

    def convert(self) -> Tensor:
        return scaled(self.weight.detach(), self.scales.log_scale.detach())


def scaled(weight: AffineQuantizedTensor, log_scale: Tensor) -> AffineQuantizedTensor:
    """The weight with the scales as they are."""
    return AffineQuantizedTensor({**weight.inner_tensors, "scale": _scale(weight.scale, log_scale)}, weight.scheme)


def _scale(initial: Any, log_scale: Tensor) -> Tensor:
    limits = torch.finfo(initial.dtype)
    return (initial.float() * log_scale.exp()).clamp(limits.tiny, limits.max).to(initial.dtype)


class _ScaledProduct(torch.autograd.Function):
    """y = x w^T, as the converted layer computes it; what is kept of the weight is its codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_scale: Tensor, weight: AffineQuantizedTensor) -> Tensor:
        # A compiler cannot read the scheme of a tensor that its graph makes: there, floats are multiplied.
        compiling = torch.compiler.is_compiling()
        ctx.weight = None if compiling else weight.detach()
        ctx.save_for_backward(x, log_scale, *((weight,) if compiling else ()))
        if not compiling:
            return linear.multiply(x, scaled(weight, log_scale))
        return torch.mm(_input(x, weight), _values(weight, log_scale).t()).to(x.dtype)

    @staticmethod
    @once_differentiable
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, log_scale, *saved = ctx.saved_tensors
        weight = saved[0] if saved else ctx.weight
        g, values = grad_outputs[0].float(), _values(weight, log_scale)
        grad_x = torch.mm(g, values).to(x.dtype) if ctx.needs_input_grad[0] else None
        view = BlockView(values.shape, weight.scheme.weight.block_size(values.shape))
        of_weight = view.split(torch.mm(g.t(), _input(x, weight)) * values)
        return grad_x, (of_weight.sum(view.dims) if view.dims else of_weight).reshape(log_scale.shape), None


def _values(weight: AffineQuantizedTensor, log_scale: Tensor) -> Tensor:
    codes, scale, zero_point = weight.plain()
    return weight.scheme.weight.dequantize(codes, _scale(scale, log_scale), zero_point)


def _input(x: Tensor, weight: AffineQuantizedTensor) -> Tensor:
    """What the weight multiplies, in fp32."""
    spec = weight.scheme.activation
    return x.float() if spec is None else dequantize_rows(spec, *quantize_input(x, weight))[: x.shape[0]]


TrainScales.layers = layers.table_of(ScaledLinear)
