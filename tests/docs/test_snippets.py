"""Every Python snippet of the README and the docs runs, and every `qtorch` command in a block of bash.

The blocks of a page run from top to bottom in one namespace, in an empty folder. Each block of the README runs by
itself, in a fresh interpreter. Those of docs/extending are whole files, which tests/extending runs. A block that cannot
run has ``<!-- skip: next "reason" -->`` above it, and is counted here.
"""

import contextlib
import importlib.util
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

from qtorch.cli import main
from tests.docs.pages import PAGES, README, ROOT, blocks, name
from tests.fast_part import slow_but

SKIPPED = {
    # Blocks that are left out, or are where a package is missing.
    "docs/guides/gguf.md": 3,  # need gguf
    "docs/guides/accelerate.md": 2,  # need accelerate
    "docs/guides/peft.md": 6,  # need peft
    "docs/guides/qat.md": 1,  # needs transformers
    "docs/guides/transformers.md": 2,  # need accelerate; compiles
    "docs/guides/diffusers.md": 1,  # needs diffusers
    "docs/guides/several_processes.md": 3,  # run under torchrun
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
            assert main(shlex.split(line)[1:]) == 0, line


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


def test_skips_are_counted_and_have_a_reason() -> None:
    skips = {name(page): re.findall(r"^<!-+ *skip: *(.*?) *-+>", page.read_text(), flags=re.M) for page in PAGES}
    assert {page: len(found) for page, found in skips.items() if found} == SKIPPED
    assert all(
        re.fullmatch(r'next (if\(.+, reason="[^"]+"\)|"[^"]+")', skip) for found in skips.values() for skip in found
    )


def test_fences_say_what_they_are() -> None:
    """A block of Python that does not say so would not run."""
    silent = [
        f"{name(page)}:{block.line}"
        for page in PAGES
        for block in blocks(page.read_text())
        if not block.language and any(line.startswith(("import ", "from ")) for line in block.text.splitlines())
    ]
    assert silent == []
