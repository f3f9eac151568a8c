"""Steps that run right after a module of another package is imported.

`integrations` imports the part of qtorch that belongs to it, once qtorch is imported. Before that, `offer_qtorch` lets
transformers and diffusers load folders of qtorch without ``import qtorch``: it puts a name into their tables of
quantizers, and qtorch is imported when a folder is loaded whose `quant_method` is "qtorch". `qtorch_autoload` runs this
file for that without importing the package, so it imports nothing but Python's own modules.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

METHOD = "qtorch"

INTEGRATIONS = {
    "transformers.quantizers.auto": "qtorch.integrations.transformers",
    "diffusers.quantizers.auto": "qtorch.integrations.diffusers",
}
"""Module with a table of quantizers -> module that registers that of qtorch."""


def offer_qtorch() -> None:
    """Offer qtorch to the modules of `INTEGRATIONS` right after they are imported."""
    for name, integration in INTEGRATIONS.items():
        after_import(name, partial(_offer, integration))


def _offer(integration: str, module: ModuleType) -> None:
    class Later:
        """Stands for qtorch's class of configurations until a folder asks for it."""

        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            table.pop(METHOD)
            import_module(integration)
            return table[METHOD].from_dict(*args, **kwargs)

    table: dict[str, Any] = getattr(module, "AUTO_QUANTIZATION_CONFIG_MAPPING", {})  # of a version that has none
    table.setdefault(METHOD, Later)


def after_import(name: str, step: Callable[[ModuleType], None], key: object = None) -> None:
    """Call `step` with the module `name` right after it is imported, for each `key` once; now, if it is already.

    A finder at the front of `sys.meta_path` waits for the name: it asks the finders behind it, and adds the step to
    the loader that they return. After that it removes itself. Python holds the lock of a module while it loads it, so
    the step runs in one thread, once.
    """
    if name in sys.modules:
        step(sys.modules[name])
    elif not any(isinstance(each, _Watch) and (each.name, each.key) == (name, key) for each in sys.meta_path):
        sys.meta_path.insert(0, _Watch(name, step, key))


class _Watch(MetaPathFinder):
    """The finder that waits for `name`."""

    def __init__(self, name: str, step: Callable[[ModuleType], None], key: object) -> None:
        self.name, self.step, self.key = name, step, key

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        if fullname != self.name or self not in finders:
            return None
        # Those behind it alone: of two that wait for one name, the second would ask the first again.
        behind = finders[finders.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in behind)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._add_step(spec.loader)
        return spec

    def _add_step(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            # A new list: another thread that iterates over the old one would skip a finder.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            self.step(module)

        loader.exec_module = exec_module
