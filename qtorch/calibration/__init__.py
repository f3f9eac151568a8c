"""All that looks at data: calibrated recipes, transforms of a model, observers, bit allocation.

quantize_(model, gptq(int4_weight_only(), batches))
quantize_(model, observed(int8_static_activation_int8_weight(), batches))
"""

from .allocation.allocate import allocate
from .calibrated import CalibratedRecipe as calibrated
from .compare import Comparison, ModuleError, OutputError, compare_models
from .methods import ImportanceWeighted as importance_weighted
from .methods import auto, gptq, observed
from .observers import Observer, delayed_scaling, entropy, min_max, moving_average, mse, percentile, weighted_stats
from .rounding import AutoRound, Descent, FloatTarget, Gptq, Nearest, Rounding, ScaleRefit, ScaleSearch, four_over_six
from .transforms import Awq, Clip, Rotate, Smooth, Transform, awq, clip, rotate, smooth

__all__ = [
    "AutoRound", "Awq", "Clip", "Comparison", "Descent", "FloatTarget", "Gptq", "ModuleError", "Nearest", "Observer",
    "OutputError", "Rotate", "Rounding", "ScaleRefit", "ScaleSearch", "Smooth", "Transform", "allocate", "auto", "awq",
    "calibrated", "clip", "compare_models", "delayed_scaling", "entropy", "four_over_six", "gptq",
    "importance_weighted", "min_max", "moving_average", "mse", "observed", "percentile", "rotate", "smooth",
    "weighted_stats",
]  # fmt: skip
