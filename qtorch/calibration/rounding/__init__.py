"""Algorithms that choose codes by the output of a layer; plain tensors in, a `Grid` out."""

from .auto_round import AutoRound, Learnable
from .gptq import Descent, FloatTarget, Gptq
from .grid import Grid, Nearest, Refinement, Rounding
from .scale_search import ScaleRefit, ScaleSearch, four_over_six

__all__ = [
    "AutoRound", "Descent", "FloatTarget", "Gptq", "Grid", "Learnable", "Nearest", "Refinement", "Rounding",
    "ScaleRefit", "ScaleSearch", "four_over_six",
]  # fmt: skip
