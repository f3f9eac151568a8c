"""Kernels in C++, compiled when qtorch is installed (`build.py`); without a compiler, those in torch operators run."""

from ...primitives.discovery import import_modules

import_modules(__name__, __path__)
