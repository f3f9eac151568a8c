"""transformers: `from_pretrained`, `save_pretrained` and `Trainer` for models that qtorch quantizes.

Importing it registers the quantizer "qtorch"; ``import qtorch`` does so as soon as transformers is imported.
"""

from ...model.install import LISTENERS
from ...primitives.supported_versions import check_version

check_version("transformers")

from .generation import compile_generate
from .loading_plan import QtorchConfig
from .quantizer import QtorchHfQuantizer, model_changed

__all__ = ["QtorchConfig", "QtorchHfQuantizer", "compile_generate"]

if model_changed not in LISTENERS:
    LISTENERS.append(model_changed)
