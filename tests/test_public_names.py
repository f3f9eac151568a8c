"""Every public name of an earlier version still imports; those of tests/golden/public_names.json are of 0.1.0."""

import importlib
import json
from pathlib import Path

import pytest

NAMES = json.loads((Path(__file__).parent / "golden" / "public_names.json").read_text())
# Where a module has moved since, its names are public in its new place.
MOVED = {"qtorch.dtypes.layouts": "qtorch.layouts"}


@pytest.mark.parametrize("module", NAMES)
def test_names_import(module: str) -> None:
    found = importlib.import_module(MOVED.get(module, module))
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []
