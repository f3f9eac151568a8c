"""Checkpoint formats of other packages, one file or folder for each; each registers a `Source`.

Every module of this package is imported here, so adding a file adds a format.
"""

from ..discovery import import_modules

import_modules(__name__, __path__)
