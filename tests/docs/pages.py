"""The pages of the documentation, and what is in them: fences, links, anchors."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        README,
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *(p for p in DOCS.rglob("*.md") if "_build" not in p.parts),
    ]
)

FENCE = re.compile(r"^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)[ \t]*$", re.M | re.S)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")


class Block(NamedTuple):
    """A fence: its language, its text, the number of its first line, and where it starts and ends in the page."""

    language: str
    text: str
    line: int
    start: int
    end: int


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    return [
        Block(match["language"].strip(), match["text"], text.count("\n", 0, match.start()) + 2, *match.span())
        for match in FENCE.finditer(text)
    ]


def prose(text: str) -> str:
    """A page without its fences and comments; code in a line is emptied, so that links in it do not count."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.S)
    return re.sub(r"(`+)[^`\n]+?\1", "``", text)


def links(text: str) -> list[str]:
    return LINK.findall(prose(text))


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} +(.*?) *#*$", FENCE.sub("", text), flags=re.M)
    found: set[str] = set()
    for heading in headings:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(anchor)
    return found
