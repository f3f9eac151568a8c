"""Kernels in C++, compiled when qtorch is installed (`build.py`); without a compiler, those in torch operators run."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if _module.name != "__main__":
        importlib.import_module(f"{__name__}.{_module.name}")
