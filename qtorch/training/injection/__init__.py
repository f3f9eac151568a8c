"""Injection: every contraction of any code runs in the engine, inside of a context; see `injection`."""

from ...primitives.discovery import import_modules

import_modules(__name__, __path__)
