"""Import of every module of a package, so that adding a file adds a kernel, layout or recipe."""

import importlib
import pkgutil
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from dis import opmap

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


def no_attribute(module: str, name: str, known: Iterable[str], hint: str = "") -> Exception:
    """What the `__getattr__` of a module raises for a name that it does not have, with the nearest one that it has. In
    ``from module import name`` it is an `ImportError`: Python would drop the message of an `AttributeError`."""
    near = get_close_matches(name, known := list(known), 1) or [each for each in known if each.startswith(f"{name}_")]
    hint = hint or (f"did you mean {' or '.join(near)}?" if near else "")
    frame = sys._getframe(2)
    imports = frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]
    what = f"cannot import name {name!r} from {module!r}" if imports else f"module {module!r} has no attribute {name!r}"
    return (ImportError if imports else AttributeError)(f"{what}; {hint}" if hint else what)
