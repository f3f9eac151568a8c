"""Import of every module of a package, so that adding a file adds a kernel, layout or recipe."""

import importlib
import pkgutil
from collections.abc import Iterable

LATER = ("qtorch.calibration", "qtorch.training")
"""Rooms with registered recipes that `import qtorch` leaves to their first use."""


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import every module and package in `package`, whose ``__path__`` is `path`, by name, except ``__main__``."""
    for module in pkgutil.iter_modules(path):
        if module.name != "__main__":
            importlib.import_module(f"{package}.{module.name}")


def import_later() -> None:
    """Import the rooms in `LATER`: a name that no registry has may be theirs."""
    for room in LATER:
        importlib.import_module(room)
