"""Connections to other packages. None of them is imported before it is used."""

from . import wrappers

__all__ = ["wrappers"]
