"""Write the type stubs of the packages whose names come from a registry, so that editors and mypy can follow them.

A recipe is added by adding its file; its name in `qtorch` is made when the package is imported, where no type checker
sees it. `make stubs` writes each such name with its class into ``__init__.pyi``; a test says when that has to be done.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("qtorch", "qtorch.calibration", "qtorch.calibration.observers", "qtorch.recipes", "qtorch.training")

HEAD = '"""Written by tools/stubs.py from the registry: `make stubs`."""\n# ruff: noqa\n\n'


def path_of(package: str) -> Path:
    """Of the stub."""
    file = importlib.import_module(package).__file__
    assert file is not None
    return Path(file).with_name("__init__.pyi")


def text_of(package: str) -> str:
    """The stub that the package should have."""
    module = importlib.import_module(package)
    lines = {}
    for name in module.__all__:
        home, own = _home(getattr(module, name), name, package)
        lines[name] = f"from {_relative(home, package)} import {own} as {name}\n"
    extra = "__version__: str\n" if hasattr(module, "__version__") else ""
    inside = pkgutil.iter_modules(module.__path__)
    packages = [m.name for m in inside if m.ispkg and isinstance(getattr(module, m.name, None), ModuleType)]
    imports = sorted([*lines.values(), *(f"from . import {name} as {name}\n" for name in packages)])
    names = "".join(f'    "{name}",\n' for name in sorted(lines))
    return f"{HEAD}{''.join(imports)}\n{extra}__all__ = [\n{names}]\n"


def _home(value: Any, name: str, package: str) -> tuple[str, str]:
    """The module that defines `value`, and its name there."""
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", name)
    if module is not None and getattr(sys.modules.get(module), own, None) is value:
        return module, own
    homes = [m for m, found in sys.modules.items() if m.startswith("qtorch.") and vars(found).get(name) is value]
    if not homes:
        raise ValueError(f"{package}.{name} is defined in no module of qtorch")
    return max(homes, key=lambda m: (m.count("."), m)), name


def _relative(module: str, package: str) -> str:
    there, here = module.split("."), package.split(".")
    common = 0
    while common < min(len(there), len(here)) and there[common] == here[common]:
        common += 1
    return "." * (len(here) - common + 1) + ".".join(there[common:])


def main() -> None:
    """Write all of them."""
    for package in PACKAGES:
        path_of(package).write_text(text_of(package))


if __name__ == "__main__":
    main()
