"""The three products of a layer in training, forward and two of its gradient, each quantized as its spec says."""

from ...primitives.discovery import import_modules

import_modules(__name__, __path__)
