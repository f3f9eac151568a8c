"""FP4: all three matmuls with operands in e2m1, in NVFP4 or MXFP4.

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

from dataclasses import dataclass, replace
from typing import ClassVar

from ...primitives import AbsMaxRule, PerBlock, QuantSpec, Rounding, mx_spec, nvfp4_spec
from ...recipes.base import register_recipe
from ..engine.gemm_spec import GemmSpec, TrainingSpec
from .base import TrainingRecipe

EDEN_BLOCK = 128
"""Elements that share a correction, as in the kernels of Quartet II; the more, the closer to exact is its mean."""


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
@dataclass(frozen=True)
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
@dataclass(frozen=True)
class Mxfp4Training(Fp4Recipe):
    """MXFP4: blocks of 32, weights in blocks of 32 x 32, which divide both sides of every weight. Converts to the
    scheme of `mxfp4_dynamic_activation_mxfp4_weight()`. The first two arguments are those of
    `nvfp4_training`.
    """

    # A scale of OCP's rule is absmax / 8 at least, where 6 is the largest code.
    element_spec, room = mx_spec("float4_e2m1"), 4 / 3

    stochastic_rounding: bool = True
    hadamard: bool = True
