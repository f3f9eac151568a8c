"""Written by tools/stubs.py from the registry: `make stubs`."""
# ruff: noqa

from .base import OBSERVERS as OBSERVERS
from .base import Observer as Observer
from .base import observer_of as observer_of
from .base import register_observer as register_observer
from .extremes import DelayedScalingObserver as delayed_scaling
from .extremes import MinMaxObserver as min_max
from .extremes import MovingAverageObserver as moving_average
from .extremes import WeightedStatsObserver as weighted_stats
from .search import EntropyObserver as entropy
from .search import MSEObserver as mse
from .search import PercentileObserver as percentile

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
