"""Training in small floats: all three matmuls in float8, with a scale per row, per tensor or per block, or in FP4.

FP4 is e2m1, in NVFP4 or MXFP4:

    output       y  = Q(x) Q(w)^T                   along rows; w in square blocks
    grad_input   dx = SR(g) Q(w)                    the codes of the forward: a square block transposed is one
    grad_weight  dw = SR(g^T D H) Q(x^T D H)^T      D H the random Hadamard transform of the tokens

Q rounds to nearest and SR stochastically, in blocks along the contracted axis. Scales of gradients leave room for their
own rounding, so that nothing clips and the expectation of SR(g) is g. Sources: NVIDIA, arXiv 2509.25149, section 4;
Tseng et al., arXiv 2502.20586 (unbiased MXFP4); Chmiel et al., arXiv 2505.19115 (stochastic rounding).

With `ms_eden`, of NVFP4, all operands of the backward pass the transform, in blocks of 128, and are rounded to nearest;
their scales carry what makes them unbiased (`contraction.unbiased`; Quartet II, arXiv 2601.22813). Scales of MXFP4 are
powers of two: rounding these stochastically costs more than it saves.

    dx = E(g D H) E(w^T D H)^T,    dw = E(g^T D H) E(x^T D H)^T
"""

from dataclasses import replace
from typing import ClassVar

import torch

from ...primitives import AbsMaxRule, Granularity, PerBlock, PerRow, PerTensor, QuantSpec, Rounding, qdtype
from ...primitives.spec import mx_spec, nvfp4_spec
from ...recipes.base import register_recipe
from ...recipes.float8 import Float8DynamicActivationFloat8Weight
from ..engine.gemm_spec import GemmSpec, TrainingSpec
from .base import TrainingRecipe

_WORDS: dict[str, Granularity]
_WORDS = {"rowwise": PerRow(), "tensorwise": PerTensor(), "blockwise": PerBlock((128, 128))}

EDEN_BLOCK = 128
"""Elements that share a correction, as in the kernels of Quartet II; the more, the closer to exact is its mean."""


@register_recipe("float8_training")
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

    def training_spec(self) -> TrainingSpec:
        linear = Float8DynamicActivationFloat8Weight(self.granularity).linear_spec()
        weight, activation = linear.weight, linear.activation
        assert activation is not None
        by_granularity = torch.float8_e5m2 if isinstance(self.granularity, PerTensor) else torch.float8_e4m3fn
        gradient = replace(activation, dtype=qdtype(self.gradient_dtype or by_granularity))
        blocks = isinstance(self.granularity, PerBlock)
        grad_input = GemmSpec(gradient, None if blocks else weight, reuse_forward=blocks)
        grad_weight = GemmSpec(gradient, activation) if self.grad_weight else GemmSpec()
        return TrainingSpec(GemmSpec(activation, weight), grad_input, grad_weight)


@register_recipe("mxfp8_training")
class Mxfp8Training(TrainingRecipe):
    """Every operand in e4m3, with a power-of-two scale for each 32 elements of its contracted axis (OCP Microscaling
    specification v1.0; Rouhani et al., arXiv 2310.10537, section 4). 32 divides the rows of every weight; elsewhere
    zeros complete the blocks.
    """

    def training_spec(self) -> TrainingSpec:
        spec = mx_spec("float8_e4m3fn")
        gemm = GemmSpec(spec, spec)
        return TrainingSpec(gemm, gemm, gemm)


class Fp4Recipe(TrainingRecipe):
    """Base of the recipes; `element_spec` in blocks of a row, and the `room` that rounding a scale down may take."""

    element_spec: ClassVar[QuantSpec]
    room: ClassVar[float]
    stochastic_rounding: bool
    hadamard: bool

    def training_spec(self) -> TrainingSpec:
        spec = self.element_spec
        size = spec.granularity.pattern(2)[1]
        gradient = spec
        if self.stochastic_rounding:
            gradient = replace(spec, rounding=Rounding.STOCHASTIC, scale_rule=AbsMaxRule(clipping_scale=self.room))
        return TrainingSpec(
            GemmSpec(spec, spec.with_granularity(PerBlock((size, size)))),
            GemmSpec(gradient, reuse_forward=True),
            GemmSpec(gradient, spec, hadamard=size if self.hadamard else None),
        )


@register_recipe("nvfp4_training")
class Nvfp4Training(Fp4Recipe):
    """NVFP4: blocks of 16, weights in blocks of 16 x 16, which divide both sides of every weight. Converts to the
    scheme of `nvfp4_dynamic_activation_nvfp4_weight()`. Leave the first and the last layers in floating point by a
    mapping, as NVIDIA's report does; see docs/guides/low_precision_training.md.

    Args:
        stochastic_rounding: of gradients; otherwise to nearest.
        hadamard: transform the operands of `grad_weight`.
        ms_eden: in place of both, MS-EDEN for both products of the backward: half the squared error of gradients.
    """

    # An e4m3 scale is rounded down by at most one part in 17.
    element_spec, room = nvfp4_spec(), 17 / 16

    stochastic_rounding: bool = True
    hadamard: bool = True
    ms_eden: bool = False

    def training_spec(self) -> TrainingSpec:
        spec = super().training_spec()
        backward = GemmSpec(self.element_spec, self.element_spec, hadamard=EDEN_BLOCK, eden=True)
        return replace(spec, grad_input=backward, grad_weight=backward) if self.ms_eden else spec


@register_recipe("mxfp4_training")
class Mxfp4Training(Fp4Recipe):
    """MXFP4: blocks of 32, weights in blocks of 32 x 32, which divide both sides of every weight. Converts to the
    scheme of `mxfp4_dynamic_activation_mxfp4_weight()`. The first two arguments are those
    of `nvfp4_training`.
    """

    # A scale of OCP's rule is absmax / 8 at least, where 6 is the largest code.
    element_spec, room = mx_spec("float4_e2m1"), 4 / 3

    stochastic_rounding: bool = True
    hadamard: bool = True
