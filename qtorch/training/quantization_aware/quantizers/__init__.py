"""Quantizers with state: ranges that are observed, and steps that are learned."""

from ....discovery import import_modules

import_modules(__name__, __path__)
