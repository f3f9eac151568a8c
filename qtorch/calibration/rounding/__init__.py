"""Algorithms that choose codes by the output of a layer; plain tensors in, a `Grid` out."""

from .base import Nearest, Refinement, Rounding
from .descent import Descent
from .gptq import Gptq
from .grid import Grid
from .quadratic import damped, loss
from .scale_refit import ScaleRefit
from .target import FloatTarget

__all__ = [
    "Descent",
    "FloatTarget",
    "Gptq",
    "Grid",
    "Nearest",
    "Refinement",
    "Rounding",
    "ScaleRefit",
    "damped",
    "loss",
]
