"""Operations on plain tensors that several kernels share, each with its portable code in torch operators."""

from ...primitives.discovery import import_modules

import_modules(__name__, __path__)
