"""The pages and the README: links, names, tables, figures, snippets that run; the website builds."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import unittest
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import qtorch
import qtorch.calibration
import qtorch.primitives
import qtorch.training
from benchmarks.bench_cpu_linear import markdown
from tests.docs.pages import DOCS, PAGES, README, ROOT, anchors, blocks, links, name
from tests.fast_part import slow_but

SOURCES = [
    path
    for folder in ("qtorch", "tests", "benchmarks", "tutorials", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page: Path) -> None:
    wrong = []
    for link in links(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT):
            wrong.append(f"{link}: no such file")
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target.read_text())):
            wrong.append(f"{link}: no such heading")
    assert wrong == []


def test_pages_images_and_skips() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in SOURCES
        for page in re.findall(r"\bdocs/[\w/]+\.(?:md|png)\b", path.read_text())
    }
    assert [(path, page) for path, page in sorted(named) if not (ROOT / page).exists()] == []
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page.read_text())}
    images = {path for path in DOCS.rglob("*") if path.suffix in {".png", ".svg"} and "_build" not in path.parts}
    assert sorted(map(name, images - shown)) == []
    skips = {name(page): re.findall(r"^<!-+ *skip: *(.*?) *-+>", page.read_text(), flags=re.M) for page in PAGES}
    assert {page: len(found) for page, found in skips.items() if found} == SKIPPED
    assert all(
        re.fullmatch(r'next (if\(.+, reason="[^"]+"\)|"[^"]+")', skip) for found in skips.values() for skip in found
    )
    # A block of Python that does not say so would not run.
    silent = [
        f"{name(page)}:{block.line}"
        for page in PAGES
        for block in blocks(page.read_text())
        if not block.language and any(line.startswith(("import ", "from ")) for line in block.text.splitlines())
    ]
    assert silent == []


PACKAGES = ("qtorch.recipes.", "qtorch.calibration.", "qtorch.training.")
NEED_OTHERS = {"qtorch.integrations.lightning", "qtorch.integrations.torchtitan"}
"""Modules of packages that are not installed for the tests."""
OWN = [name for name, recipe in qtorch.recipes.base.RECIPES.items() if recipe.__module__.startswith(PACKAGES)]


@pytest.mark.parametrize("name", OWN)
def test_recipes(name: str) -> None:
    assert f"`{name}(" in (DOCS / "reference" / "recipes.md").read_text()


def test_kernels_and_features() -> None:
    """Those of the tables are registered; one that is registered may wait for its line."""
    page = (DOCS / "reference" / "kernels.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, flags=re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 20
    assert named - {kernel.name for kernel in qtorch.kernels.registry._kernels} == set()
    # What AQT v2 and AQTp have, a row each.
    assert len({row[0] for row in ROWS}) == len(ROWS) == 32


def test_names_and_words_of_qtorch_exist() -> None:
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
    # And the code and the pages have none of the words that the glossary replaces.
    rows = re.findall(r"^\| (.+?) \| ", (DOCS / "reference" / "glossary.md").read_text(), re.M)[1:]
    words = [word.strip() for row in rows for term in re.findall(r"\*\*(.+?)\*\*", row) for word in term.split(",")]
    source = "\n".join(path.read_text() for path in sorted((ROOT / "qtorch").rglob("*.py")))
    missing = [word for word in words if not re.search(rf"\b{word.replace(' ', '[ _-]?')}", source, re.IGNORECASE)]
    assert missing == []
    assert len(words) > 60
    assert rows == sorted(rows, key=lambda row: row.lower().strip("*"))
    replaced = r"\b(lengthened|(?:class|def) (?:Wanted|Missed|Kept|calibrate_cpu))\b"
    assert [word for t in (source, *(page.read_text() for page in PAGES)) for word in re.findall(replaced, t)] == []


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


SITE_PACKAGES = ("sphinx", "myst_parser", "furo")


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in SITE_PACKAGES), reason=f"needs {', '.join(PACKAGES)}"
)
def test_builds_without_a_warning(tmp_path: Path) -> None:
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-d", str(tmp_path / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path / "html")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    api = (tmp_path / "html" / "reference" / "api.html").read_text()
    assert all(f'id="qtorch.{name}"' in api for name in ("quantize_", "int8_weight_only", "training.qat", "QuantSpec"))


PAGE = (DOCS / "reference" / "aqt.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| AQT |")
]
FILES = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
TESTS = {name for text in FILES for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}


def names() -> dict[str, Any]:
    """What an expression may use."""
    found: dict[str, Any] = {"torch": torch, "batches": [torch.zeros(1, 4)]}
    for module in (qtorch.calibration, qtorch.primitives, qtorch, qtorch.training):
        found |= {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    clipping = qtorch.QuantSpec("int4", scale_rule=qtorch.primitives.AbsMaxRule(0.5))  # type: ignore[arg-type]
    return found | {"clipping": clipping}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row(row: list[str]) -> None:
    _, answer, spelling, tested = row
    assert answer == "yes"
    expressions = re.findall(r"`([^`]+)`", spelling)
    assert expressions
    for expression in expressions:
        assert eval(expression, names()) is not None
    tests = re.findall(r"`(\w+)`", tested)
    assert tests
    assert [test for test in tests if test not in TESTS] == []


SKIPPED = {
    # Blocks that are left out, or are where a package is missing.
    "docs/guides/gguf.md": 3,  # need gguf
    "docs/guides/accelerate.md": 2,  # need accelerate
    "docs/guides/peft.md": 7,  # need peft, or a training loop
    "docs/guides/qat.md": 1,  # needs transformers
    "docs/guides/transformers.md": 2,  # need accelerate; compiles
    "docs/guides/diffusers.md": 1,  # needs diffusers
    "docs/guides/several_processes.md": 4,  # run under torchrun
    "docs/guides/export.md": 3,  # need onnxruntime, executorch; compiles
}


def python_blocks(page: Path) -> int:
    return sum(block.language == "python" for block in blocks(page.read_text()))


WITH_PYTHON = [page for page in PAGES if python_blocks(page) and page.parent.name != "extending"]


@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page != README], ids=name)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sybil = pytest.importorskip("sybil")
    markdown = pytest.importorskip("sybil.parsers.markdown")
    monkeypatch.chdir(tmp_path)
    commands = markdown.CodeBlockParser(language="bash", evaluator=run_commands)
    document = sybil.Sybil([markdown.PythonCodeBlockParser(), commands, markdown.SkipParser()]).parse(page)
    document.namespace["importlib"] = importlib  # for conditions of skips
    for example in document.examples():
        with warnings.catch_warnings(), contextlib.suppress(unittest.SkipTest):
            warnings.simplefilter("ignore")
            example.evaluate()


def run_commands(example: Any) -> None:
    """Run the lines of a block that call `qtorch`."""
    for line in example.parsed.splitlines():
        if line.startswith("qtorch "):
            assert qtorch.cli.main(shlex.split(line)[1:]) == 0, line


@pytest.mark.parametrize("index", slow_but([0], range(python_blocks(README))))
def test_readme(index: int, tmp_path: Path) -> None:
    text = README.read_text()
    everything = blocks(text)
    position = [i for i, block in enumerate(everything) if block.language == "python"][index]
    block = everything[position]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", block.text]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == 0, f"README.md:{block.line}\n{done.stderr}"
    for output in everything[position + 1 : position + 2]:
        if output.language == "text" and not text[block.end : output.start].strip():
            # Kernels differ between machines; the first line does not.
            assert done.stdout.splitlines()[0] == output.text.splitlines()[0]
