"""Scales alone are trained, the codes are fixed: the second phase of EfficientQAT (Chen et al., arXiv 2407.11062, 3.3).

    w = (codes - zero_point) s,   s = s0 exp(log_scale),   dL/dlog_scale = sum over the block of dL/dw w
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....calibration.statistics import Statistics
from ....dtypes import AffineQuantizedTensor
from ....kernels.ops.quantize import dequantize_rows, quantize_input
from ....kernels.registry import to_rows
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
    """Weights of `nn.Linear`, exactly, are stored as codes, as in inference, and their scales are trained. Whatever else
    has a gradient, norms say, trains with them: `model.requires_grad_(False)` first leaves the scales alone.

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

    def scaled(self) -> AffineQuantizedTensor:
        """The weight with the scales as they are."""
        weight = self.weight.detach()
        limits = torch.finfo(weight.scale.dtype)
        scale = weight.scale.float() * self.scales.log_scale.detach().exp()
        inner = {**weight.inner_tensors, "scale": scale.clamp(limits.tiny, limits.max).to(weight.scale.dtype)}
        return AffineQuantizedTensor(inner, weight.scheme)

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scaled = self.scaled()
        y = functional.linear(input, scaled, bias)
        return tracing.apply(_ScaleGradient, y, input, self.scales.log_scale, scaled)

    def convert(self) -> Tensor:
        return self.scaled()


class _ScaleGradient(torch.autograd.Function):
    """y as it is, with the gradient of log_scale; what is kept of the weight is its codes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, log_scale: Tensor, weight: AffineQuantizedTensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return y.view_as(y)

    @staticmethod
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x,), weight = grad_outputs, ctx.saved_tensors, ctx.weight
        rows, spec = to_rows(x), weight.scheme.activation
        if spec is not None:
            rows = dequantize_rows(spec, *quantize_input(rows, weight))[: rows.shape[0]]
        of_weight = torch.mm(to_rows(g).float().t(), rows.float()).mul_(weight.dequantize(torch.float32))
        view = BlockView(weight.shape, weight.scheme.weight.block_size(weight.shape))
        blocks = view.split(of_weight)
        return g, None, (blocks.sum(view.dims) if view.dims else blocks).reshape(weight.scale.shape), None


TrainScales.layers = layers.table_of(ScaledLinear)
