"""float8: all three matmuls in float8, with a scale per row, per tensor or per block."""

from dataclasses import dataclass, replace

import torch

from ...primitives import Granularity, PerBlock, PerRow, PerTensor, mx_spec, qdtype
from ...recipes.base import register_recipe
from ...recipes.float8 import Float8DynamicActivationFloat8Weight
from ..engine import gemm_spec
from .base import TrainingRecipe

_WORDS: dict[str, Granularity]
_WORDS = {"rowwise": PerRow(), "tensorwise": PerTensor(), "blockwise": PerBlock((128, 128))}


@register_recipe("float8_training")
@dataclass(frozen=True)
class Float8Training(TrainingRecipe):
    """Weights and activations in e4m3, gradients in `gradient_dtype` (Micikevicius et al., arXiv 2209.05433).

    Converts to the scheme of `float8_dynamic_activation_float8_weight(granularity)`.

    Args:
        granularity: `PerRow()` or ``"rowwise"``; `PerTensor()` or ``"tensorwise"``; `PerBlock((128, 128))` or
            ``"blockwise"``: DeepSeek-V3's (arXiv 2412.19437, section 3.3), weights in square blocks, which forward and
            backward share, all other operands in 1 x 128 along the axis that their product contracts. Blocks divide
            both sides of every weight; zeros complete the tokens.
        gradient_dtype: of the gradients that come in. None is e4m3 per row and per block, where a scale spans few
            magnitudes, and e5m2, of less precision and more range, per tensor.
        grad_weight: quantize the gradient of the weight too.
    """

    granularity: Granularity = PerRow()
    gradient_dtype: torch.dtype | None = None
    grad_weight: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.granularity, str):
            object.__setattr__(self, "granularity", _WORDS.get(self.granularity, self.granularity))
        sizes = self.granularity.sizes if isinstance(self.granularity, PerBlock) else ()
        if not isinstance(self.granularity, PerRow | PerTensor) and (len(sizes) != 2 or len(set(sizes)) > 1):
            raise ValueError(
                f"{self.name}: granularity is 'rowwise', 'tensorwise', 'blockwise' or PerBlock of a square, got "
                f"{self.granularity!r}"
            )
        super().__post_init__()

    def training_spec(self) -> gemm_spec.TrainingSpec:
        linear = Float8DynamicActivationFloat8Weight(self.granularity).linear_spec()
        weight, activation = linear.weight, linear.activation
        assert activation is not None
        by_granularity = torch.float8_e5m2 if isinstance(self.granularity, PerTensor) else torch.float8_e4m3fn
        gradient = replace(activation, dtype=qdtype(self.gradient_dtype or by_granularity))
        blocks = isinstance(self.granularity, PerBlock)
        grad_input = gemm_spec.GemmSpec(gradient, None if blocks else weight, reuse_forward=blocks)
        grad_weight = gemm_spec.GemmSpec(gradient, activation) if self.grad_weight else gemm_spec.GemmSpec()
        return gemm_spec.TrainingSpec(gemm_spec.GemmSpec(activation, weight), grad_input, grad_weight)


@register_recipe("mxfp8_training")
@dataclass(frozen=True)
class Mxfp8Training(TrainingRecipe):
    """Every operand in e4m3, with a power-of-two scale for each 32 elements of its contracted axis (OCP Microscaling
    specification v1.0; Rouhani et al., arXiv 2310.10537, section 4). 32 divides the rows of every weight; elsewhere
    zeros complete the blocks.
    """

    def training_spec(self) -> gemm_spec.TrainingSpec:
        spec = mx_spec("float8_e4m3fn")
        gemm = gemm_spec.GemmSpec(spec, spec)
        return gemm_spec.TrainingSpec(gemm, gemm, gemm)
