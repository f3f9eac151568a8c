"""Connections to other packages. None of them is imported before it is used.

ON_IMPORT       module of the other package -> module of this one, imported right after it
"""

import warnings
from functools import partial
from importlib import import_module
from types import ModuleType

from ..primitives.supported_versions import UnsupportedVersion
from . import wrappers  # noqa: F401 (its hooks)
from .import_watch import after_import

__all__ = [
    *("accelerate", "bitsandbytes", "diffusers", "export", "fusion", "lightning", "peft"),
    *("serving_engines", "tensor_parallel", "torchao", "torchtitan", "transformers", "wrappers"),
]
"""Modules; all but the last are imported by their first use, as ``qtorch.integrations.peft``."""

ON_IMPORT = {
    "transformers.quantizers.auto": "qtorch.integrations.transformers",
    "transformers.modeling_utils": "qtorch.integrations.transformers.save_pretrained",
    "transformers.integrations.moe": "qtorch.integrations.transformers.experts_interface",
    "diffusers.quantizers.auto": "qtorch.integrations.diffusers",
    "accelerate.checkpointing": "qtorch.integrations.accelerate",
}


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def watch_imports() -> None:
    """Import each integration now if the module that it waits for is imported, else right after it is. If that fails, a
    warning says so, and the import of the other package succeeds."""
    for name, follower in ON_IMPORT.items():
        after_import(name, partial(_follow, follower), key=follower)


def _follow(follower: str, module: ModuleType) -> None:
    try:
        import_module(follower)
    except UnsupportedVersion as error:
        warnings.warn(str(error), stacklevel=2)
    except Exception as error:
        warnings.warn(
            f"{follower} does not work with this version of {module.__name__.partition('.')[0]}: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
