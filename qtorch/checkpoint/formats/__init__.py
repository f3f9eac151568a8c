"""Checkpoints of other packages: each is a `Source`, which `load_quantized` reads.

Every module of this package is imported here, which registers the formats.
"""

from ...primitives.discovery import import_modules

import_modules(__name__, __path__)
