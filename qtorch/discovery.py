"""Import of every module of a package: what adds a kernel, layout or recipe by adding its file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import every module of `package`, whose ``__path__`` is `path`, and every package in it, in order of their names;
    but no ``__main__``."""
    for module in pkgutil.iter_modules(path):
        if module.name != "__main__":
            importlib.import_module(f"{package}.{module.name}")
