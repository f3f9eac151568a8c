"""Every public name of an earlier version still imports; those of tests/golden/public_names.json are of 0.1.0. What
messages tell the reader to call is there."""

import ast
import builtins
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import qtorch
from qtorch.recipes.base import RECIPES

CODE = """
import qtorch
from qtorch.training import int8_mixed_precision_training

reveal_type(qtorch.int4_weight_only(group_size=32))
reveal_type(int8_mixed_precision_training())
qtorch.int4_weight_only(groupsize=32)
qtorch.int5_weight_only
"""
NAMES = json.loads((Path(__file__).parent / "golden" / "public_names.json").read_text())


@pytest.mark.parametrize("module", NAMES)
def test_names_import(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("name", qtorch._MOVED)
def test_names_that_moved_say_where_to(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"qtorch\.{name} has moved: write {qtorch._MOVED[name]}$"):
        getattr(qtorch, name)
    module, _, last = qtorch._MOVED[name].rpartition(".")
    assert hasattr(importlib.import_module(module), last)


def test_every_recipe_has_a_public_name() -> None:
    """A recipe is added by its file; its name is added by hand, so that editors see it."""
    for name, recipe in RECIPES.items():
        home = ".".join(recipe.__module__.split(".")[:2])
        if home in ("qtorch.recipes", "qtorch.calibration", "qtorch.training"):
            assert getattr(importlib.import_module(home), name) is recipe
            assert home != "qtorch.recipes" or getattr(qtorch, name) is recipe


@pytest.mark.slow
def test_mypy_sees_the_recipes(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(CODE)
    options = ["--no-incremental", "--follow-imports=silent", "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", *options, str(tmp_path / "user.py")]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    told = [line.split(": ", 2)[2] for line in lines if "user.py" in line and 'note: "' not in line]
    assert told[0] == 'Revealed type is "qtorch.recipes.integer.Int4WeightOnly"'
    assert told[1] == 'Revealed type is "qtorch.training.recipes.int8.Int8MixedPrecisionTraining"'
    assert told[2].startswith('Unexpected keyword argument "groupsize" for "Int4WeightOnly"')
    assert told[3].startswith('Module has no attribute "int5_weight_only"')


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
    packages = ["calibration", "integrations.torchao", "integrations.transformers", "kernels", "primitives", "training"]
    places = [qtorch, *(importlib.import_module(f"qtorch.{package}") for package in packages)]
    places += [builtins, torch, torch.Tensor, torch.nn.Module]
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
