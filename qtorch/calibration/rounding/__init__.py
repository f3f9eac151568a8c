"""Algorithms that choose codes by the output of a layer; plain tensors in, a `Grid` out."""

from .auto_round import AutoRound, Learnable
from .base import Nearest, Refinement, Rounding
from .descent import Descent
from .gptq import Gptq
from .grid import Grid
from .quadratic import damped, loss, saliency
from .scale_refit import ScaleRefit
from .scale_search import ScaleSearch, four_over_six
from .target import FloatTarget

__all__ = [
    "AutoRound",
    "Descent",
    "FloatTarget",
    "Gptq",
    "Grid",
    "Learnable",
    "Nearest",
    "Refinement",
    "Rounding",
    "ScaleRefit",
    "ScaleSearch",
    "damped",
    "four_over_six",
    "loss",
    "saliency",
]
