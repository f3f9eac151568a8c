"""Written by tools/stubs.py from the registry: `make stubs`."""
# ruff: noqa

from . import rounding as rounding
from .auto import auto as auto
from .calibrated import CalibratedRecipe as calibrated
from .gptq import gptq as gptq
from .importance_weighted import ImportanceWeighted as importance_weighted
from .rounding.base import Nearest as Nearest
from .rounding.base import Rounding as Rounding
from .rounding.descent import Descent as Descent
from .rounding.gptq import Gptq as Gptq
from .rounding.scale_refit import ScaleRefit as ScaleRefit
from .rounding.target import FloatTarget as FloatTarget

__all__ = [
    "Descent",
    "FloatTarget",
    "Gptq",
    "Nearest",
    "Rounding",
    "ScaleRefit",
    "auto",
    "calibrated",
    "gptq",
    "importance_weighted",
]
