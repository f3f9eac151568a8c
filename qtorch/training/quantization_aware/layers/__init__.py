"""Modules in quantization-aware training whose quantizers have state."""

from ....discovery import import_modules

import_modules(__name__, __path__)
