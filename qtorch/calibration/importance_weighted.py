"""Look-up tables fitted to the elements of a weight that matter: k-means weighted by the inputs they meet.

    least   sum_k E[x_k^2] (w[n, k] - table[code[n, k]] * scale[n])^2

is the error of the layer's output for inputs whose elements are not correlated (SqueezeLLM, arXiv 2306.07629, section
4.1, with the layer's inputs in place of the loss's gradients).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from ..dtypes import LUTQuantizedTensor
from ..primitives import CodebookSpec, LinearSpec
from ..recipe import Data, WeightRecipe, register_recipe
from ..statistics import MeanSquare, Statistic, Statistics


@register_recipe("importance_weighted")
@dataclass(frozen=True)
class ImportanceWeighted(WeightRecipe):
    """`recipe` with tables that k-means fits under the mean square of each input, E[x_k^2], over `batches`.

    Args:
        recipe: one whose tables k-means chooses: `lut_weight_only`.
        batches: inputs of the model; a mapping is given as keyword arguments, a tuple or list as arguments, all else as
            the only one.
        forward: called as ``forward(model, batch)`` instead.

    Raises:
        ValueError: the tables of the recipe are not chosen by k-means.
    """

    statistics: ClassVar[tuple[type[Statistic], ...]] = (MeanSquare,)

    recipe: WeightRecipe
    batches: Iterable[Any] = field(repr=False, compare=False)
    forward: Callable[[nn.Module, Any], Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        weight = self.linear_spec().weight
        if not isinstance(weight, CodebookSpec) or weight.table is not None:
            raise ValueError(
                f"importance_weighted: k-means chooses no table in {self.recipe}; use a recipe such as "
                "lut_weight_only(bits=3)"
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
