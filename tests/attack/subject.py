"""The columns of the matrix: every recipe that is registered, with small layers to attack."""

import warnings
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from qtorch import block_sparse, int4_weight_only, int8_dynamic_activation_int8_weight, low_rank, quantize_
from qtorch.dtypes import QuantizedTensor
from qtorch.model.install import PreparedModule
from qtorch.primitives.codebooks import CodebookSpec
from qtorch.recipes.base import Recipe, WeightRecipe
from qtorch.recipes.sparse import BlockSparse
from qtorch.training import TrainingWeight
from qtorch.training.weights.codes import WeightInCodes
from tests import every_recipe
from tests.attack import training_recipes

N, K = 96, 64

M = TypeVar("M", bound=nn.Module)


class Experts(nn.Module):
    """Matrices in one parameter."""

    def __init__(self, experts: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, outputs, K) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.expand(len(self.weight), -1, -1), self.weight.mT)


@dataclass(frozen=True)
class Subject:
    """A recipe, and layers that it has quantized."""

    name: str
    recipe: Recipe

    def __str__(self) -> str:
        return self.name

    @property
    def trains(self) -> bool:
        return self.recipe.trains

    @property
    def stochastic(self) -> bool:
        """Weights live in codes, and what is written to them is rounded stochastically."""
        return isinstance(self.layer().weight, WeightInCodes)

    @property
    def clips(self) -> bool:
        """Whether inputs beyond a range of its own are clipped."""
        spec = getattr(self.layer().weight, "scheme", None)
        return isinstance(self.layer(), PreparedModule) or getattr(getattr(spec, "spec", None), "static", False)

    def values(self, seed: int = 1) -> Tensor:
        """A float weight (N, K)."""
        return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) / 8

    def float_layer(self, seed: int = 1) -> nn.Linear:
        """In floating point, with the weight of this seed."""
        layer = nn.Linear(K, N)
        with torch.no_grad():
            layer.weight.copy_(self.values(seed))
            layer.bias.copy_(torch.linspace(-1, 1, N))
        return layer

    def layer(self, seed: int = 1) -> nn.Linear:
        """Quantized; modules that learn from their first input have had it, the same for every weight."""
        return self.quantize(self.float_layer(seed))

    def model(self, seed: int = 1) -> nn.Sequential:
        """Two quantized layers with something between."""
        first, second = self.float_layer(seed), nn.Linear(N, 32, bias=False)
        with torch.no_grad():
            second.weight.copy_(torch.randn(32, N, generator=torch.Generator().manual_seed(seed)))
        return self.quantize(nn.Sequential(first, nn.Tanh(), second))

    def quantize(self, model: M) -> M:
        """`model` quantized in place."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantize_(model, self.recipe)
            if any(isinstance(module, PreparedModule) for module in model.modules()):
                with torch.no_grad():
                    dtype = next(model.parameters()).dtype
                    x = torch.randn(
                        64, K, generator=torch.Generator().manual_seed(3), dtype=torch.float32, device="cpu"
                    )
                    model(x.to(dtype))
        return model

    def fresh(self, values: Tensor, like: nn.Linear) -> nn.Linear:
        """A layer with this weight, never called; `like` is one before it was changed, whose state it has."""
        if isinstance(like, PreparedModule):
            like._parameters["weight"] = nn.Parameter(values.clone(), like.weight.requires_grad)
            return like
        layer = self.float_layer()
        layer._parameters["weight"] = nn.Parameter(values.clone())
        return self.quantize(layer)

    @property
    def family(self) -> str:
        """The column of the table that it is in."""
        weight = self.layer().weight
        if isinstance(self.layer(), PreparedModule):
            return "prepared layers"
        if isinstance(weight, TrainingWeight):
            in_codes = "trains in codes" if self.stochastic else "trains in float"
            return "qat" if type(weight).__name__ == "FakeQuantizedWeight" else in_codes
        assert isinstance(weight, QuantizedTensor)
        assert isinstance(self.recipe, WeightRecipe)
        spec = self.recipe.linear_spec()
        if self.recipe.branch_rank:
            return "low-rank branch"
        if isinstance(self.recipe, BlockSparse):
            return "sparse in blocks"
        if self.recipe.prunes:
            return "2:4 sparse"
        if isinstance(spec.weight, CodebookSpec):
            return "look-up tables"
        if spec.activation is None:
            return "weight-only"
        return "static activations" if spec.static else "dynamic activations"


SUBJECTS = [
    *(Subject(name, every_recipe.make(name, 32)) for name in every_recipe.NAMES),
    Subject("block_sparse", block_sparse(int8_dynamic_activation_int8_weight(), 0.5, block_size=16)),
    Subject("low_rank", low_rank(int4_weight_only(group_size=32), rank=4)),
    *(Subject(name, training_recipes.make(name)) for name in [*training_recipes.NAMES, *training_recipes.VARIANTS]),
]

FEW = ("int8_weight_only", "int4_weight_only", "nf4_weight_only", "int8_dynamic_activation_int8_weight")
FEW += ("int8_static_activation_int8_weight", "int8_dynamic_activation_int8_semi_sparse_weight", "block_sparse")
FEW += ("low_rank", "qat", "lsq")
FEW += ("int8_mixed_precision_training", "int8_weight_only_quantized_training")
"""One or two of each family, for operations that take seconds."""
