"""What the reference lists is what there is."""

import json
import re

import pytest

import qtorch
from benchmarks.bench_cpu_linear import markdown
from qtorch.kernels import registry
from qtorch.recipes.base import RECIPES

from .pages import DOCS, PAGES, ROOT

PACKAGES = ("qtorch.recipes.", "qtorch.calibration.", "qtorch.training.")
NEED_OTHERS = {"qtorch.integrations.lightning", "qtorch.integrations.torchtitan"}
"""Modules of packages that are not installed for the tests."""
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
            if path in NEED_OTHERS:
                continue
            for part in path.split(".")[1:]:
                if not hasattr(value, part):
                    wrong.add((page.name, path))
                    break
                value = getattr(value, part)
    assert wrong == set()


@pytest.mark.parametrize("instruction_set", ["amx", "avx512_vnni"])
def test_tables_of_linear_layers(instruction_set: str) -> None:
    """The pages of results have the figures of benchmarks/results/cpu_linear_*.json."""
    saved = ROOT / "benchmarks" / "results" / f"cpu_linear_{instruction_set}.json"
    page = "".join(path.read_text() for path in (DOCS / "performance").glob("results*.md"))
    shown = page.partition(f"<!-- cpu_linear_{instruction_set}: begin -->")[2].partition("<!--")[0].strip()
    if not saved.exists():
        assert shown == "Not measured yet."
        return
    data = json.loads(saved.read_text())
    assert shown == markdown(data["machine"], data["rows"])
    assert shown.count("|") > 300


def test_the_glossary_has_words_of_the_code() -> None:
    """And the code and the pages have none of the words that the glossary replaces."""
    rows = re.findall(r"^\| (.+?) \| ", (DOCS / "reference" / "glossary.md").read_text(), re.M)[1:]
    words = [word.strip() for row in rows for term in re.findall(r"\*\*(.+?)\*\*", row) for word in term.split(",")]
    source = "\n".join(path.read_text() for path in sorted((ROOT / "qtorch").rglob("*.py")))
    missing = [word for word in words if not re.search(rf"\b{word.replace(' ', '[ _-]?')}", source, re.IGNORECASE)]
    assert missing == []
    assert len(words) > 60
    assert rows == sorted(rows, key=lambda row: row.lower().strip("*"))
    replaced = r"\b(lengthened|(?:class|def) (?:Wanted|Missed|Kept|calibrate_cpu))\b"
    assert [
        word for text in (source, *(page.read_text() for page in PAGES)) for word in re.findall(replaced, text)
    ] == []
