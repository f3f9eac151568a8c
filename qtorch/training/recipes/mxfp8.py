"""MXFP8: all three matmuls in e4m3 with a power-of-two scale for each 32 elements."""

from __future__ import annotations

from dataclasses import dataclass

from ...primitives import qdtype
from ...recipe import register_recipe
from ...recipes.mx import mx_spec
from ..engine.spec import GemmSpec, TrainingSpec
from .base import TrainingRecipe


@register_recipe("mxfp8_training")
@dataclass(frozen=True)
class Mxfp8Training(TrainingRecipe):
    """Every operand in blocks of 32 along its contracted axis (OCP Microscaling specification v1.0; Rouhani et al.,
    arXiv 2310.10537, section 4). 32 divides the rows of every weight; elsewhere zeros complete the blocks.
    """

    def training_spec(self) -> TrainingSpec:
        spec = mx_spec(qdtype("float8_e4m3fn"))
        gemm = GemmSpec(spec, spec)
        return TrainingSpec(gemm, gemm, gemm)


mxfp8_training = Mxfp8Training
