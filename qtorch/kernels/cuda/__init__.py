"""Kernels for CUDA, most by Triton: of shared operations and of `F.linear`, one per file."""

from ...primitives.discovery import import_modules

import_modules(__name__, __path__)
