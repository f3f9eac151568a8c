"""Every relative link leads to a file of the repository, and every anchor to a heading of its page."""

import re
from pathlib import Path

import pytest

from .pages import DOCS, PAGES, ROOT, anchors, links, name

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


def test_pages_that_the_source_names_exist() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in SOURCES
        for page in re.findall(r"\bdocs/[\w/]+\.(?:md|png)\b", path.read_text())
    }
    assert [(path, page) for path, page in sorted(named) if not (ROOT / page).exists()] == []


def test_images_are_shown() -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page.read_text())}
    images = {path for path in DOCS.rglob("*") if path.suffix in {".png", ".svg"} and "_build" not in path.parts}
    assert sorted(map(name, images - shown)) == []
