"""Integers: mixed precision, with weights in floating point and some or all matmuls in int8."""

from ...primitives import MappingType, PerBlock, PerTensor, QuantSpec, Rounding, qdtype
from ...primitives.jsonable import jsonable
from ...recipes.base import register_recipe
from ..engine.gemm_spec import GemmSpec, TrainingSpec
from ..engine.numerics import int8, integer
from .base import EdgeRecipe, TrainingRecipe


@jsonable
class Int8MixedPrecisionTrainingConfig:
    """Which matmuls run in int8, the others in full precision.

    Args:
        output: y = x @ w.T
        grad_input: dx = g @ w
        grad_weight: dw = g.T @ x. The first to leave in full precision if training does not converge.
        stochastic_rounding: round gradients stochastically.
    """

    output: bool = True
    grad_input: bool = True
    grad_weight: bool = True
    stochastic_rounding: bool = False


@register_recipe("int8_mixed_precision_training")
class Int8MixedPrecisionTraining(TrainingRecipe):
    """int8 x int8 -> int32, each operand quantized along its contracted axis on each call (AQT, arXiv 2105.03536).

    Trained with `output`, a model converts to the scheme of `int8_dynamic_activation_int8_weight()`.
    """

    config: Int8MixedPrecisionTrainingConfig = Int8MixedPrecisionTrainingConfig()

    def training_spec(self) -> TrainingSpec:
        config = self.config
        rounding = Rounding.STOCHASTIC if config.stochastic_rounding else Rounding.NEAREST_EVEN
        full, forward, backward = GemmSpec(), GemmSpec(int8(), int8()), GemmSpec(int8(rounding=rounding), int8())
        return TrainingSpec(
            forward if config.output else full,
            backward if config.grad_input else full,
            backward if config.grad_weight else full,
        )


@register_recipe("int8_tilewise_training")
class Int8TilewiseTraining(TrainingRecipe):
    """JetFire: weights, activations and gradients in int8 in tiles (Xi et al., arXiv 2403.12422). A tile transposed is
    a tile, so every tensor is quantized once, and what the backward needs of an activation is kept in int8: a quarter
    of the memory that fp32 takes.

    Args:
        tile: side of a tile; it divides both sides of every weight. Tokens are completed with zeros.
    """

    tile: int = 32

    def training_spec(self) -> TrainingSpec:
        tiles = int8(PerBlock((self.tile, self.tile)))
        backward = GemmSpec(tiles, reuse_forward=True)
        return TrainingSpec(GemmSpec(tiles, tiles), backward, backward)


@register_recipe("switchback_training")
class SwitchbackTraining(TrainingRecipe):
    """Activations and gradients in int8 with a scale per row, weights in int8 with one scale; forward and
    backward use the same codes (Wortsman et al., arXiv 2304.13013, algorithm 1). The gradient of a weight sums over
    many more terms than the other two matmuls, so it stays in full precision.
    """

    def training_spec(self) -> TrainingSpec:
        return TrainingSpec(GemmSpec(int8(), int8(PerTensor())), GemmSpec(int8(), reuse_forward=True))


@register_recipe("int4_training")
class Int4Training(EdgeRecipe):
    """int4 x int4 -> int32 in the forward; dx = g @ w_hat and dw = g.T @ x in full precision (Abdolrashidi et al.,
    arXiv 2105.03536).

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
