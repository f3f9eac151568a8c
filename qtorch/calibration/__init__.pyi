"""Written by tools/stubs.py from the registry: `make stubs`."""
# ruff: noqa

from . import rounding as rounding
from . import transforms as transforms
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
from .transforms.awq import Awq as Awq
from .transforms.awq import Awq as awq
from .transforms.base import Transform as Transform
from .transforms.clip import Clip as Clip
from .transforms.clip import Clip as clip
from .transforms.rotate import Rotate as Rotate
from .transforms.rotate import Rotate as rotate
from .transforms.smooth import Smooth as Smooth
from .transforms.smooth import Smooth as smooth

__all__ = [
    "Awq",
    "Clip",
    "Descent",
    "FloatTarget",
    "Gptq",
    "Nearest",
    "Rotate",
    "Rounding",
    "ScaleRefit",
    "Smooth",
    "Transform",
    "auto",
    "awq",
    "calibrated",
    "clip",
    "gptq",
    "importance_weighted",
    "rotate",
    "smooth",
]
