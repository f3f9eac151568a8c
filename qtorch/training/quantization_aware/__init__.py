"""Quantization-aware training: layers that compute what the converted layer will, with a gradient."""

from ...primitives.discovery import import_modules

import_modules(__name__, __path__)
