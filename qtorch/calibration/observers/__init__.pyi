"""Written by tools/stubs.py from the registry: `make stubs`."""
# ruff: noqa

from .base import OBSERVERS as OBSERVERS
from .base import Observer as Observer
from .base import observer_of as observer_of
from .base import register_observer as register_observer
from .delayed_scaling import DelayedScalingObserver as delayed_scaling
from .entropy import EntropyObserver as entropy
from .min_max import MinMaxObserver as min_max
from .moving_average import MovingAverageObserver as moving_average
from .mse import MSEObserver as mse
from .percentile import PercentileObserver as percentile
from .weighted_stats import WeightedStatsObserver as weighted_stats

__all__ = [
    "OBSERVERS",
    "Observer",
    "delayed_scaling",
    "entropy",
    "min_max",
    "moving_average",
    "mse",
    "observer_of",
    "percentile",
    "register_observer",
    "weighted_stats",
]
