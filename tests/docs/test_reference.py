"""What the reference lists is what there is."""

import json
import re

import pytest

import qtorch
from qtorch.kernels import registry
from qtorch.quantize_api import RECIPES

from .pages import DOCS, ROOT

PACKAGES = ("qtorch.recipes.", "qtorch.calibration.", "qtorch.training.")
OWN = [name for name, recipe in RECIPES.items() if recipe.__module__.startswith(PACKAGES)]


@pytest.mark.parametrize("name", OWN)
def test_recipes(name: str) -> None:
    assert f"`{name}(" in (DOCS / "reference" / "recipes.md").read_text()


def test_kernels() -> None:
    """Those of the tables are registered; one that is registered may wait for its line."""
    page = (DOCS / "reference" / "kernels.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, flags=re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 20
    assert named - {kernel.name for kernel in registry._kernels} == set()


def test_names_of_qtorch_exist() -> None:
    """`from qtorch import x` in any form is executed elsewhere; this is for names in the text."""
    wrong = set()
    for page in [ROOT / "README.md", *(DOCS / "guides").glob("*.md"), *(DOCS / "reference").glob("*.md")]:
        for path in re.findall(r"`(qtorch(?:\.\w+)+)", page.read_text()):
            value = qtorch
            for part in path.split(".")[1:]:
                if not hasattr(value, part):
                    wrong.add((page.name, path))
                    break
                value = getattr(value, part)
    assert wrong == set()


def test_table_of_linear_layers() -> None:
    """docs/performance/results.md has the figures of benchmarks/results/cpu_linear.json."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "cpu_linear.json").read_text())["rows"]
    names = {
        "float, us": "float us",
        "`int8_weight_only()`": "int8 weight-only",
        "`int4_weight_only(group_size=128)`": "int4 g128",
        "`int4_weight_only(group_size=32)`": "int4 g32",
        "`int8_dynamic_activation_int8_weight()`": "int8 dynamic",
        "`int8_dynamic_activation_int4_weight()`": "int8 dynamic, int4 g32",
        "torchao int8 weight-only": "torchao int8_weight_only",
        "torchao int8 dynamic": "torchao int8_dynamic_activation_int8_weight",
    }
    text = (DOCS / "performance" / "results.md").read_text().partition("\n## Whole models")[0]
    shape, compared = [], 0
    for line in text.splitlines():
        if match := re.search(r"(\d+) x (\d+):$", line):
            shape = [int(match[1]), int(match[2])]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = cells[0].removesuffix(", no compiler")
        key = names.get(name)
        if not line.startswith("| ") or key is None:
            continue
        key += ", no compiler" if "no compiler" in cells[0] else ""
        measured = [row[key] for dtype in ("float32", "bfloat16") for row in _rows(rows, shape, dtype)]
        wanted = [f"{value:.0f}" if key == "float us" else f"{value:.2f}" for value in measured]
        assert cells[1:] == wanted, line
        compared += len(wanted)
    assert compared >= 200


def _rows(rows: list[dict], shape: list[int], dtype: str) -> list[dict]:
    found = [row for row in rows if row["shape"] == shape and row["dtype"] == f"torch.{dtype}"]
    return sorted(found, key=lambda row: row["rows"])
