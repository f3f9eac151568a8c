"""Adapters under quantization-aware training: the base is frozen, what is fake-quantized is the merged weight.

    w = w_base + (alpha / r) b a,   a (r, K), b (N, r),   y = x_hat @ w_hat.T + bias

(Hu et al., arXiv 2106.09685, for the adapters.) So the converted weight has the adapters in it, with codes of its own:
merging them into a quantized base would round twice.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ....calibration.statistics import Statistics
from ....dtypes.dispatch import without_autocast
from ....model.install import keep_attributes
from ....model.targets import Target
from ....recipes.base import Recipe, WeightRecipe, check_has_values, register_recipe
from .. import fake_quantize, layers
from ..qat_weight import QATSpec
from .base import LayerRecipe, check_inference_recipe


@register_recipe("lora_qat")
class LoRAQAT(LayerRecipe):
    """Layers, `nn.Linear` exactly, get `lora_a` and `lora_b` as parameters, and their weight no gradient; `convert()`
    merges and quantizes. b starts at zero: the layer computes what the quantized base does.

    Args:
        recipe: for inference, what the merged weights become by `convert()`.
        rank: r.
        alpha: of the equation at the top of the file; None is the rank.
        compute_dtype: see `qat`.

    Raises:
        TypeError: `recipe` is not an inference recipe.
        ValueError: a rank that is not positive, or an alpha that is not a positive number.
    """

    recipe: WeightRecipe
    rank: int
    alpha: float | None = None
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_inference_recipe(self.recipe, self.name)
        if self.rank < 1:
            raise ValueError(f"{self.name}: the rank of adapters is 1 or more, got {self.rank}")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ValueError(f"{self.name}: alpha is a positive number, got {self.alpha}")

    def check_complete(self) -> None:
        self.recipe.check_complete()

    def check(self, weight: Tensor) -> None:
        check_has_values(weight, self)
        self.recipe.check(weight)

    def check_target(self, target: Target[Any]) -> None:
        Recipe.check_target(self, target)
        for slot in target.slots:
            if type(slot.module) is not nn.Linear or slot.attribute != "weight":
                raise ValueError(f"adapters are for nn.Linear, exactly; this is a parameter of {type(slot.module)}")
        if len(target.modules) > 1:
            raise ValueError(f"adapters are for one layer, the weight is shared by {len(target.modules)}")
        if self.rank > min(target.parameter.shape):
            raise ValueError(f"rank {self.rank} exceeds the weight's shape {tuple(target.parameter.shape)}")

    def has_made(self, target: Target[Any]) -> bool:
        layer = target.modules[0]
        return (
            isinstance(layer, LoRALinear)
            and layer.qat_spec == QATSpec(self.recipe, self.compute_dtype)
            and layer.lora_a.shape[0] == self.rank
            and layer.lora_scale == self.scale
        )

    @property
    def scale(self) -> float:
        """alpha / r."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank

    def make(self, target: Target[Any], weight: Tensor, statistics: Statistics | None = None) -> Tensor:
        return weight

    def install(self, target: Target[Any], made: Tensor) -> None:
        (module,) = target.modules
        module.weight = keep_attributes(nn.Parameter(made, requires_grad=False), target.parameter)
        lora_a = nn.Parameter(made.new_empty(self.rank, made.shape[1]))
        nn.init.kaiming_uniform_(lora_a, a=math.sqrt(5))
        lora_b = nn.Parameter(made.new_zeros(made.shape[0], self.rank))
        values = (lora_a, lora_b, self.scale, QATSpec(self.recipe, self.compute_dtype))
        LoRALinear.prepare(module, dict(zip(LoRALinear.added, values, strict=True)))


class LoRALinear(layers.TrainedLayer, nn.Linear):
    """`nn.Linear` with adapters; see the top of the file."""

    added = ("lora_a", "lora_b", "lora_scale", "qat_spec")

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float
    qat_spec: QATSpec

    def merged(self) -> Tensor:
        """w, differentiable in the adapters; under autocast too in the dtype of the weight."""
        with without_autocast(self.weight.device.type):
            return torch.addmm(self.weight, self.lora_b, self.lora_a, alpha=self.lora_scale)

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return fake_quantize.fake_quantized_linear(input, self.merged(), bias, self.qat_spec)

    def check_convert(self) -> None:
        self.qat_spec.recipe.check(self.merged().detach())

    @torch.no_grad()
    def convert(self) -> Tensor:
        return self.qat_spec.recipe.apply(self.merged())


LoRAQAT.layers = layers.table_of(LoRALinear)
