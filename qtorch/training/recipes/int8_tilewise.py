"""JetFire: int8 with a scale for each square tile; forward and backward use the same tiles."""

from __future__ import annotations

from dataclasses import dataclass

from ...primitives import PerBlock
from ...recipe import register_recipe
from ..engine.numerics import int8
from ..engine.spec import GemmSpec, TrainingSpec
from .base import TrainingRecipe


@register_recipe("int8_tilewise_training")
@dataclass(frozen=True)
class Int8TilewiseTraining(TrainingRecipe):
    """Weights, activations and gradients in int8 in tiles (Xi et al., arXiv 2403.12422). A tile transposed is a tile,
    so every tensor is quantized once, and what the backward needs of an activation is kept in int8: a quarter of the
    memory that fp32 takes.

    Args:
        tile: side of a tile; it divides both sides of every weight. Tokens are completed with zeros.
    """

    tile: int = 32

    def training_spec(self) -> TrainingSpec:
        tiles = int8(PerBlock((self.tile, self.tile)))
        backward = GemmSpec(tiles, reuse_forward=True)
        return TrainingSpec(GemmSpec(tiles, tiles), backward, backward)


int8_tilewise_training = Int8TilewiseTraining
