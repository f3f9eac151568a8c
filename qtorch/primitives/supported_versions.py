"""The oldest versions of other packages that qtorch works with; `make versions` runs the tests with them.

What differs between versions of a package stands where it is used, in `integrations/`.
"""

import re
from importlib import import_module

OLDEST = {"torch": "2.11", "transformers": "5.0", "peft": "0.18", "accelerate": "1.10", "diffusers": "0.39"}
"""Package -> version; pyproject.toml asks for the same."""


class UnsupportedVersion(ImportError):
    """A package is older than qtorch takes it."""


def check_version(package: str) -> None:
    """Import a package of `OLDEST`; `UnsupportedVersion` if it is older than that."""
    installed = getattr(import_module(package), "__version__", None)
    oldest = OLDEST[package]
    if installed is not None and _numbers(installed) < _numbers(oldest):
        found = f"{package} {oldest} and newer, and {package} {installed} is installed"
        raise UnsupportedVersion(f"qtorch works with {found}: pip install '{package}>={oldest}'")


def _numbers(version: str) -> tuple[int, ...]:
    """The major and the minor version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
