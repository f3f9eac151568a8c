"""4-bit training: weights and activations of 4 bits, 8 at the edges (Abdolrashidi et al., arXiv 2105.03536)."""

from __future__ import annotations

from dataclasses import dataclass

from ...primitives import MappingType, QuantSpec, qdtype
from ...recipe import Recipe, register_recipe
from ..engine.numerics import fully_quantized, integer
from ..engine.spec import GemmSpec, TrainingSpec
from .edges import EdgeRecipe
from .mixed_precision import MixedPrecisionTraining


@register_recipe("int4_training")
@dataclass(frozen=True)
class Int4Training(EdgeRecipe):
    """int4 x int4 -> int32 in the forward; dx = g @ w_hat and dw = g.T @ x in full precision.

    Weights are symmetric, by output channel. Activations use all 16 codes of their range, which after a ReLU begins at
    zero. Converts to weights of 4 bits, two in a byte, and 4-bit activations.

    Args:
        edge_bits: of the first and the last weight of the model and of their activations; None: four as well.
    """

    edge_bits: int | None = 8

    def training_spec(self) -> TrainingSpec:
        # In the type of 8 bits, which the kernels for inference read.
        activation = QuantSpec(qdtype("int8"), mapping=MappingType.ASYMMETRIC, quant_min=-8, quant_max=7)
        return TrainingSpec(GemmSpec(activation, integer(4)), GemmSpec(reuse_forward=True))

    def at_edge(self) -> Recipe:
        return MixedPrecisionTraining(fully_quantized(self.edge_bits, None, grad_weight=False))


int4_training = Int4Training
