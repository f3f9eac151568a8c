"""Connections to other packages. None of them is imported before it is used."""

from importlib import import_module
from types import ModuleType

from . import wrappers

__all__ = ["accelerate", "peft", "wrappers"]

MODULES = ("accelerate", "peft")
"""Modules that are imported by their first use, as ``qtorch.integrations.peft``."""


def __getattr__(name: str) -> ModuleType:
    if name in MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
