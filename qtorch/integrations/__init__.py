"""Connections to other packages. None of them is imported before it is used.

ON_IMPORT       module of the other package -> module of this one, imported right after it
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from . import wrappers
from .after_import import after_import

__all__ = ["accelerate", "diffusers", "peft", "tensor_parallel", "transformers", "wrappers"]

MODULES = ("accelerate", "diffusers", "peft", "tensor_parallel", "transformers")
"""Modules that are imported by their first use, as ``qtorch.integrations.peft``."""

ON_IMPORT = {
    "transformers.quantizers.auto": "qtorch.integrations.transformers",
    "transformers.modeling_utils": "qtorch.integrations.transformers.save_pretrained",
    "transformers.integrations.moe": "qtorch.integrations.transformers.experts",
    "diffusers.quantizers.auto": "qtorch.integrations.diffusers",
    "accelerate.checkpointing": "qtorch.integrations.accelerate_files",
}


def __getattr__(name: str) -> ModuleType:
    if name in MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def watch_imports() -> None:
    """Import the integrations whose packages are imported already, and the others when theirs are."""
    for name, integration in ON_IMPORT.items():
        after_import(name, integration)
