"""Weights in training: tensor subclasses that hold floats (`master`) or codes (`codes`) and say how they multiply."""

from ...primitives.discovery import import_modules

import_modules(__name__, __path__)
