"""Binary training: weights and activations of one bit, the sign, as in PokeBNN (Zhang et al., arXiv 2112.00133).

    w_hat = max |w| sign(w)   by output channel        x_hat = bound sign(x)
    y = x_hat @ w_hat.T,   dx = (g @ w_hat) [|x| <= bound],   dw = g.T @ x_hat

Gradients pass straight through the sign, and stop where an activation lies outside the bound. The sign needs inputs of
both signs: no ReLU before a layer, but a batch norm, which also takes up the scales. The padding of a convolution is
quantized with the image, as +bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...primitives import FixedRangeRule, PerTensor, QuantSpec, ZeroPointDomain, qdtype
from ...recipe import Recipe, register_recipe
from ..engine.numerics import fully_quantized, integer
from ..engine.spec import GemmSpec, TrainingSpec
from .edges import EdgeRecipe
from .mixed_precision import MixedPrecisionTraining


@register_recipe("binary_training")
@dataclass(frozen=True)
class BinaryTraining(EdgeRecipe):
    """See the top of the file. Converts to weights of one bit, eight in a byte, and binary activations.

    Args:
        bound: of activations; larger ones clip.
        edge_bits: of the first and the last weight of the model, which are the most sensitive, and of their
            activations; None: one as well.

    Raises:
        ValueError: a bound that is not positive.
    """

    bound: float = 3.0
    edge_bits: int | None = 8

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"{self.name}: bound is positive, got {self.bound}")
        super().__post_init__()

    def training_spec(self) -> TrainingSpec:
        rule = FixedRangeRule(-self.bound, self.bound)
        sign = QuantSpec(qdtype("midrise1"), PerTensor(), zero_point_domain=ZeroPointDomain.NONE, scale_rule=rule)
        straight_through = GemmSpec(reuse_forward=True)
        forward = GemmSpec(sign, integer(1, preserve_zero=False))
        return TrainingSpec(forward, straight_through, straight_through, clip_gradient=True)

    def at_edge(self) -> Recipe:
        return MixedPrecisionTraining(fully_quantized(self.edge_bits, None, grad_weight=False))


binary_training = BinaryTraining
