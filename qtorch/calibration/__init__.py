"""All that looks at data: calibrated recipes, transforms of a model, observers, bit allocation.

quantize_(model, gptq(int4_weight_only(), batches))
quantize_(model, observed(int8_static_activation_int8_weight(), batches))
"""

from .allocation.allocate import allocate
from .calibrated import CalibratedRecipe as calibrated
from .importance_weighted import ImportanceWeighted as importance_weighted
from .methods import auto, gptq, observed
from .observers.base import Observer
from .observers.extremes import DelayedScalingObserver as delayed_scaling
from .observers.extremes import MinMaxObserver as min_max
from .observers.extremes import MovingAverageObserver as moving_average
from .observers.extremes import WeightedStatsObserver as weighted_stats
from .observers.search import EntropyObserver as entropy
from .observers.search import MSEObserver as mse
from .observers.search import PercentileObserver as percentile
from .rounding.auto_round import AutoRound
from .rounding.gptq import Descent, FloatTarget, Gptq
from .rounding.grid import Nearest, Rounding
from .rounding.scale_search import ScaleRefit, ScaleSearch, four_over_six
from .transforms.base import Transform
from .transforms.clip import Clip
from .transforms.clip import Clip as clip
from .transforms.rotate import Rotate
from .transforms.rotate import Rotate as rotate
from .transforms.scaling import Awq, Smooth
from .transforms.scaling import Awq as awq
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
    "allocate",
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
