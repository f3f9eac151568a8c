"""Written by tools/stubs.py from the registry: `make stubs`."""
# ruff: noqa

from . import allocation as allocation
from . import engine as engine
from . import observers as observers
from . import rounding as rounding
from . import transforms as transforms
from .calibrated import CalibratedRecipe as calibrated
from .calibrated import auto as auto
from .calibrated import gptq as gptq
from .calibrated import observed as observed
from .importance_weighted import ImportanceWeighted as importance_weighted
from .observers.base import Observer as Observer
from .observers.extremes import DelayedScalingObserver as delayed_scaling
from .observers.extremes import MinMaxObserver as min_max
from .observers.extremes import MovingAverageObserver as moving_average
from .observers.extremes import WeightedStatsObserver as weighted_stats
from .observers.search import EntropyObserver as entropy
from .observers.search import MSEObserver as mse
from .observers.search import PercentileObserver as percentile
from .rounding.auto_round import AutoRound as AutoRound
from .rounding.gptq import Descent as Descent
from .rounding.gptq import FloatTarget as FloatTarget
from .rounding.gptq import Gptq as Gptq
from .rounding.grid import Nearest as Nearest
from .rounding.grid import Rounding as Rounding
from .rounding.scale_search import ScaleRefit as ScaleRefit
from .rounding.scale_search import ScaleSearch as ScaleSearch
from .rounding.scale_search import four_over_six as four_over_six
from .transforms.base import Transform as Transform
from .transforms.clip import Clip as Clip
from .transforms.clip import Clip as clip
from .transforms.rotate import Rotate as Rotate
from .transforms.rotate import Rotate as rotate
from .transforms.scaling import Awq as Awq
from .transforms.scaling import Awq as awq
from .transforms.scaling import Smooth as Smooth
from .transforms.scaling import Smooth as smooth

__all__ = [
    "AutoRound",
    "Awq",
    "Clip",
    "Descent",
    "FloatTarget",
    "Gptq",
    "Nearest",
    "Observer",
    "Rotate",
    "Rounding",
    "ScaleRefit",
    "ScaleSearch",
    "Smooth",
    "Transform",
    "auto",
    "awq",
    "calibrated",
    "clip",
    "delayed_scaling",
    "entropy",
    "four_over_six",
    "gptq",
    "importance_weighted",
    "min_max",
    "moving_average",
    "mse",
    "observed",
    "percentile",
    "rotate",
    "smooth",
    "weighted_stats",
]
