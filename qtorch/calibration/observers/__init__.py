"""Observers: which range of its input a layer represents, chosen from data.

quantize_(model, calibrated(int8_static_activation_int8_weight(), batches, observer=percentile(99.9)))
"""

from .base import OBSERVERS, Observer, observer_of, register_observer
from .extremes import DelayedScalingObserver as delayed_scaling
from .extremes import MinMaxObserver as min_max
from .extremes import MovingAverageObserver as moving_average
from .extremes import WeightedStatsObserver as weighted_stats
from .search import EntropyObserver as entropy
from .search import MSEObserver as mse
from .search import PercentileObserver as percentile

__all__ = [
    "OBSERVERS", "Observer", "delayed_scaling", "entropy", "min_max", "moving_average", "mse", "observer_of",
    "percentile", "register_observer", "weighted_stats",
]  # fmt: skip
