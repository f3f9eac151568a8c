"""Quantization-aware training for any inference recipe.

quantize_(model, qat(int8_dynamic_activation_int4_weight()))
...  # train as usual
quantize_(model, convert())

Prepared and converted weights are described by the same `LinearSpec`, that of the recipe: there is nothing to keep in
step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..primitives import QuantSpec
from ..quantize_api import Recipe, WeightRecipe, register_recipe
from .fake_quantized import QATSpec
from .fake_quantized_weight import FakeQuantizedWeight


@register_recipe("qat")
@dataclass(frozen=True)
class QAT(Recipe):
    """Weights stay in floating point and are trained; layers compute what they will compute when converted: bit for
    bit where the recipe sums integers (int8 activations), and up to the order of fp32 sums elsewhere. The codes of
    weights are the same in all cases. Gradients pass straight through rounding (see `fake_quantized`).

    It reaches what the recipe itself does: `nn.Linear`; by name embeddings, bare matrices and fused experts.

    Args:
        recipe: for inference, what the weights become by `convert()`.
        compute_dtype: of the arithmetic of fake quantization. None is fp32, as that of the kernels that serve. A
            dtype, that of the model say, is faster in bf16; products are then of fake-quantized floats, and conversion
            changes numbers by the rounding of that dtype. For affine codes.

    Raises:
        TypeError: `recipe` is no inference recipe.
        ValueError: a `compute_dtype` that is none, or with look-up tables.
    """

    trains: ClassVar[bool] = True

    recipe: WeightRecipe
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, WeightRecipe):
            raise TypeError(f"qat takes an inference recipe such as int4_weight_only(), got {self.recipe!r}")
        linear = self.recipe.linear_spec()
        if self.compute_dtype is not None:
            if not self.compute_dtype.is_floating_point:
                raise ValueError(f"qat: compute_dtype is a floating-point dtype or None, got {self.compute_dtype}")
            for spec in (linear.weight, linear.activation):
                if spec is not None and not isinstance(spec, QuantSpec):
                    raise ValueError(f"qat: compute_dtype takes affine codes, {self.recipe} has {spec}")

    def check(self, weight: Tensor) -> None:
        self.recipe.check(weight)

    def apply(self, weight: Tensor) -> Tensor:
        return FakeQuantizedWeight.of(weight, QATSpec(self.recipe, self.compute_dtype))


qat = QAT
