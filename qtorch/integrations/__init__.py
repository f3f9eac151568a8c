"""Connections to other packages. None of them is imported before it is used.

ON_IMPORT       module of the other package -> module of this one, imported right after it

If the other package is imported already, that happens at once. Otherwise a finder at the front of `sys.meta_path` waits
for the name: it asks the other finders for it, and adds a step to the loader that they return. After that step it
removes itself. Python holds the lock of a module while it loads it, so the step runs in one thread, once.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..primitives.supported_versions import UnsupportedVersion
from . import wrappers

__all__ = [
    *("accelerate", "diffusers", "export", "fusion", "peft", "tensor_parallel", "torchao", "transformers"),
    "wrappers",
]
"""Modules; all but the last are imported by their first use, as ``qtorch.integrations.peft``."""

ON_IMPORT = {
    "transformers.quantizers.auto": "qtorch.integrations.transformers",
    "transformers.modeling_utils": "qtorch.integrations.transformers.save_pretrained",
    "transformers.integrations.moe": "qtorch.integrations.transformers.experts_interface",
    "diffusers.quantizers.auto": "qtorch.integrations.diffusers",
    "accelerate.checkpointing": "qtorch.integrations.accelerate_files",
}


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def watch_imports() -> None:
    """Import each integration now if the module that it waits for is imported, else right after it is. If that fails, a
    warning says so, and the import of the other package succeeds."""
    for name, follower in ON_IMPORT.items():
        if name in sys.modules:
            _follow(name, follower)
        elif not any(isinstance(finder, _Watch) and finder.follower == follower for finder in sys.meta_path):
            sys.meta_path.insert(0, _Watch(name, follower))


class _Watch(MetaPathFinder):
    """The finder that waits for `name`."""

    def __init__(self, name: str, follower: str) -> None:
        self.name = name
        self.follower = follower

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._add_step(spec.loader)
        return spec

    def _add_step(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            # A new list: another thread that iterates over the old one would skip a finder.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            _follow(self.name, self.follower)

        loader.exec_module = exec_module


def _follow(name: str, follower: str) -> None:
    try:
        import_module(follower)
    except UnsupportedVersion as error:
        warnings.warn(str(error), stacklevel=2)
    except Exception as error:
        warnings.warn(
            f"{follower} does not work with this version of {name.partition('.')[0]}: {type(error).__name__}: {error}",
            stacklevel=2,
        )
