"""Written by tools/stubs.py from the registry: `make stubs`."""
# ruff: noqa

from . import observers as observers
from . import rounding as rounding
from . import transforms as transforms
from .auto import auto as auto
from .calibrated import CalibratedRecipe as calibrated
from .gptq import gptq as gptq
from .importance_weighted import ImportanceWeighted as importance_weighted
from .observed import observed as observed
from .observers.base import Observer as Observer
from .observers.delayed_scaling import DelayedScalingObserver as delayed_scaling
from .observers.entropy import EntropyObserver as entropy
from .observers.min_max import MinMaxObserver as min_max
from .observers.moving_average import MovingAverageObserver as moving_average
from .observers.mse import MSEObserver as mse
from .observers.percentile import PercentileObserver as percentile
from .observers.weighted_stats import WeightedStatsObserver as weighted_stats
from .rounding.auto_round import AutoRound as AutoRound
from .rounding.base import Nearest as Nearest
from .rounding.base import Rounding as Rounding
from .rounding.descent import Descent as Descent
from .rounding.gptq import Gptq as Gptq
from .rounding.scale_refit import ScaleRefit as ScaleRefit
from .rounding.scale_search import ScaleSearch as ScaleSearch
from .rounding.scale_search import four_over_six as four_over_six
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
