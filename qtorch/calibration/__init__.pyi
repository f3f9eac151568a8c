"""Written by tools/stubs.py from the registry: `make stubs`."""
# ruff: noqa

from .importance_weighted import ImportanceWeighted as importance_weighted

__all__ = [
    "importance_weighted",
]
