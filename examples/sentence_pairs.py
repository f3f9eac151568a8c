"""Text for retrieval that every Python brings along: the docstrings of its standard library.

The first sentence of a docstring is a query, the rest is the document that it should find.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test"),
    # Not part of every installation.
    *("distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"),
}
QUERY_LENGTH = range(20, 161)
DOCUMENT_LENGTH = range(80, 4001)

END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[^a-z])|\n\s*\n")
"""White space after a full stop (not "e.g. this"), or an empty line."""


@dataclass(frozen=True, order=True)
class Pair:
    """A query and the document that answers it."""

    query: str
    document: str


def docstring_pairs(count: int, seed: int = 0) -> list[Pair]:
    """Draw `count` pairs, or all there are if those are fewer; the same ones for the same Python and seed."""
    # The first document of a query wins, and the first query of a document: no pair has a second right answer.
    by_query: dict[str, Pair] = {}
    by_document: dict[str, Pair] = {}
    for docstring in standard_library_docstrings():
        pair = split_docstring(docstring)
        if pair and pair.query not in by_query and pair.document not in by_document:
            by_query[pair.query] = by_document[pair.document] = pair
    pairs = sorted(by_query.values())
    return random.Random(seed).sample(pairs, min(count, len(pairs)))


def standard_library_docstrings() -> Iterator[str]:
    """Docstrings of all modules, classes and functions, file by file in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1]):
            yield from _docstrings(path)


def split_docstring(docstring: str) -> Pair | None:
    """First sentence and rest; None if either is too short, too long or no prose."""
    query, *rest = (" ".join(part.split()) for part in END_OF_SENTENCE.split(docstring, maxsplit=1))
    document = rest[0] if rest else ""
    if len(query) not in QUERY_LENGTH or len(document) not in DOCUMENT_LENGTH:
        return None
    if not query[0].isalpha() or "->" in query or query.count(" ") < 3:
        return None
    return Pair(query, document)


def _docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
