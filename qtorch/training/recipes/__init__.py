"""Recipes for training in low precision, one a file. Every module of this package is imported here."""

from ...primitives.discovery import import_modules

import_modules(__name__, __path__)
