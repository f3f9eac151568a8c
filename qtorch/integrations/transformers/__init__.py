"""transformers: `from_pretrained`, `save_pretrained` and `Trainer` for models that qtorch quantizes.

Importing it registers the quantizer "qtorch"; ``import qtorch`` does so as soon as transformers is imported.
"""

from __future__ import annotations

from ...listeners import LISTENERS
from ...supported_versions import check_version

check_version("transformers")

from .attach import model_changed
from .config import QtorchConfig
from .quantizer import QtorchHfQuantizer

__all__ = ["QtorchConfig", "QtorchHfQuantizer"]

if model_changed not in LISTENERS:
    LISTENERS.append(model_changed)
