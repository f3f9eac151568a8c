"""Settings of the documentation's website: `make docs` builds it into docs/_build/html."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parents[1]))

import qtorch
from qtorch.primitives.discovery import import_later
from qtorch.quantize_api import RECIPES

import_later()

project = "qtorch"
author = "the qtorch authors"
version = release = qtorch.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

myst_heading_anchors = 4
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
default_role = "code"  # docstrings write `code`
autodoc_typehints = "none"  # they are in the signature
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "qtorch"
html_show_sourcelink = False

# Users call a recipe by the name that it is registered under.
for _name, _recipe in RECIPES.items():
    _recipe.__name__ = _recipe.__qualname__ = _name


class Recipes(SphinxDirective):
    """Documents all recipes that are registered by the modules of a package, sorted by name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        public = "qtorch" if package == "qtorch.recipes" else package
        names = sorted(name for name, recipe in RECIPES.items() if recipe.__module__.startswith(f"{package}."))
        rst = [line for name in names for line in (f".. autoclass:: {public}.{name}", "")]
        block = "\n".join(["```{eval-rst}", *rst, "```"])
        return self.parse_text_to_nodes(block)


def plain_words(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with `code`: outside of it, no character is a mark of reStructuredText."""
    for i, line in enumerate(lines):
        parts = re.split(r"(`+[^`]*`+)", line)
        parts[::2] = [re.sub(r"[*|]|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
        lines[i] = "".join(parts)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_directive("recipes", Recipes)
    app.connect("autodoc-process-docstring", plain_words, priority=400)  # before napoleon, whose markup stays
