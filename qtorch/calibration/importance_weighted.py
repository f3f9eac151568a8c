"""importance_weighted: look-up tables fitted by k-means that weights each column by its inputs.

It minimizes

    sum_k E[x_k^2] (w[n, k] - table[code[n, k]] * scale[n])^2

which is the error of the output of the layer for inputs with uncorrelated elements (SqueezeLLM, arXiv 2306.07629,
section 4.1, with the inputs of the layer in place of the gradients of the loss).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from ..dtypes import LUTQuantizedTensor
from ..primitives import CodebookSpec, LinearSpec
from ..recipes.base import WeightRecipe, register_recipe
from .data import Data
from .statistics import MeanSquare, Statistic, Statistics


@register_recipe("importance_weighted")
@dataclass(frozen=True)
class ImportanceWeighted(WeightRecipe):
    """`recipe` with tables fitted by k-means weighted by the mean square of each input, E[x_k^2], over `batches`.

    Args:
        recipe: a recipe whose tables are fitted by k-means: `lut_weight_only`.
        batches: inputs of the model; a mapping is passed as keyword arguments, a tuple or list as arguments, any other
            value as the only one.
        forward: called as ``forward(model, batch)`` instead of the model.

    Raises:
        ValueError: the tables of the recipe are not fitted by k-means.
    """

    statistics: ClassVar[tuple[type[Statistic], ...]] = (MeanSquare,)

    recipe: WeightRecipe
    batches: Iterable[Any] = field(repr=False, compare=False)
    forward: Callable[[nn.Module, Any], Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        weight = self.linear_spec().weight
        if not isinstance(weight, CodebookSpec) or weight.table is not None or self.recipe.branch_rank:
            raise ValueError(
                f"importance_weighted takes a recipe whose tables are fitted by k-means, such as "
                f"lut_weight_only(bits=3), got {self.recipe}"
            )

    def linear_spec(self) -> LinearSpec:
        return self.recipe.linear_spec()

    @property
    def data(self) -> Data:
        return Data(self.batches, self.forward)

    def apply_calibrated(self, weight: Tensor, statistics: Statistics) -> Tensor:
        seen = statistics[MeanSquare]
        assert isinstance(seen, MeanSquare)
        return LUTQuantizedTensor.from_float(weight, self.linear_spec(), seen.mean.to(weight.device).expand_as(weight))


importance_weighted = ImportanceWeighted
