"""Every public name of an earlier version still imports; those of tests/golden/public_names.json are of 0.1.0. What
messages tell the reader to call is there."""

import ast
import builtins
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import qtorch

NAMES = json.loads((Path(__file__).parent / "golden" / "public_names.json").read_text())
# Where a module has moved since, its names are public in its new place.
MOVED = {"qtorch.dtypes.layouts": "qtorch.primitives.layouts"}


@pytest.mark.parametrize("module", NAMES)
def test_names_import(module: str) -> None:
    found = importlib.import_module(MOVED.get(module, module))
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


OTHER_PACKAGES = {"activate_past_recording", "gradient_checkpointing_enable"}
"""Methods of models of transformers."""


def _messages(tree: ast.Module) -> Iterator[str]:
    """Strings in `raise` statements, and constants of the module, which messages are made of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Assign) and node in tree.body):
            parts = ast.walk(node)
            yield from (str(part.value) for part in parts if isinstance(part, ast.Constant) and " " in str(part.value))


def test_messages_name_calls_that_exist() -> None:
    root, missing, checked = Path(qtorch.__file__).parent, [], set()
    packages = [
        "",
        ".calibration",
        ".compat.torchao",
        ".integrations.transformers",
        ".kernels",
        ".primitives",
        ".training",
    ]
    places = [builtins, torch, torch.Tensor, torch.nn.Module]
    places += [importlib.import_module(f"qtorch{package}") for package in packages]
    for path in root.rglob("*.py"):
        for message in _messages(ast.parse(path.read_text())):
            for name in re.findall(r"(?<![\w.{])([A-Za-z_][\w.]*)\(", message):
                first, _, rest = name.partition(".")
                start = {"torch": torch, "nn": torch.nn, "qtorch": qtorch, "model": torch.nn.Module}.get(first)
                found = (
                    any(callable(getattr(place, first, None)) for place in places)
                    if start is None
                    else _has(start, rest)
                )
                checked.add(name)
                if not found and first not in OTHER_PACKAGES and (start or not rest):  # x.f(): x is the reader's
                    missing.append(f"{path.relative_to(root)}: {name}()")
    assert missing == []
    assert {"convert", "quantize_", "calibrated", "smooth", "qat"} <= checked


def _has(start: object, path: str) -> bool:
    """Whether `path` is an attribute of an attribute ... of `start`; submodules are imported."""
    for name in filter(None, path.split(".")):
        if not hasattr(start, name) and getattr(start, "__name__", "").startswith("qtorch"):
            importlib.import_module(f"{start.__name__}.{name}")  # type: ignore[attr-defined]
        if not hasattr(start, name):
            return False
        start = getattr(start, name)
    return True
