"""Training in low precision: the engine and its recipes, one a file.

quantize_(model, int8_mixed_precision_training())
...  # train as usual
quantize_(model, convert())

Every module of this package is imported here, and every recipe it registers becomes a name of this package and of
`qtorch`: a recipe is added by adding its file.
"""

from ..primitives.discovery import import_modules

import_modules(__name__, __path__)

from ..recipes.base import RECIPES  # noqa: E402
from .engine.convolutions import (  # noqa: E402
    quantized_conv1d,
    quantized_conv2d,
    quantized_conv3d,
    quantized_conv_transpose1d,
    quantized_conv_transpose2d,
    quantized_conv_transpose3d,
)
from .engine.functional import (  # noqa: E402
    quantized_einsum,
    quantized_grouped_mm,
    quantized_matmul,
)
from .engine.gemm_spec import GemmSpec, TrainingSpec  # noqa: E402
from .engine.numerics import fully_quantized, fully_quantized_float8, integer  # noqa: E402
from .injection.injection import Injection, inject  # noqa: E402
from .injection.mode import CallSite  # noqa: E402
from .optim import (  # noqa: E402
    Adam4bit,
    Adam8bit,
    AdamFp8,
    AdamW4bit,
    AdamW8bit,
    AdamWFp8,
    CPUOffloadOptimizer,
    QGaLoreAdamW8bit,
)
from .quantization_aware.fold_batch_norm import fold_batch_norm  # noqa: E402
from .quantization_aware.layers import calibrate  # noqa: E402
from .quantization_aware.learned import parameter_groups  # noqa: E402
from .quantization_aware.recipes.lsq import clip_penalty, pact  # noqa: E402
from .quantization_aware.schedule import QuantizationSchedule, advance_with  # noqa: E402
from .recipes.bitnet import precompute_bitnet_scale_for_fsdp  # noqa: E402
from .recipes.int8 import Int8MixedPrecisionTrainingConfig  # noqa: E402
from .weights.base import TrainingWeight  # noqa: E402
from .weights.codes import (
    CodesWeight,
    share_rounding,
)
from .weights.master import MasterWeight  # noqa: E402

# Their former names.
TrainableWeight, QuantizedTrainingWeight = TrainingWeight, CodesWeight

RECIPE_NAMES = sorted(name for name, cls in RECIPES.items() if cls.__module__.startswith(f"{__name__}."))

globals().update({name: RECIPES[name] for name in RECIPE_NAMES})

__all__ = [
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "CPUOffloadOptimizer",
    "CallSite",
    "CodesWeight",
    "GemmSpec",
    "Injection",
    "Int8MixedPrecisionTrainingConfig",
    "MasterWeight",
    "QGaLoreAdamW8bit",
    "QuantizationSchedule",
    "QuantizedTrainingWeight",
    "TrainableWeight",
    "TrainingSpec",
    "TrainingWeight",
    "advance_with",
    "calibrate",
    "clip_penalty",
    "fold_batch_norm",
    "fully_quantized",
    "fully_quantized_float8",
    "inject",
    "integer",
    "pact",
    "parameter_groups",
    "precompute_bitnet_scale_for_fsdp",
    "quantized_conv1d",
    "quantized_conv2d",
    "quantized_conv3d",
    "quantized_conv_transpose1d",
    "quantized_conv_transpose2d",
    "quantized_conv_transpose3d",
    "quantized_einsum",
    "quantized_grouped_mm",
    "quantized_matmul",
    "share_rounding",
    *RECIPE_NAMES,
]
