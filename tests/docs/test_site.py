"""The website builds, and a warning is an error: a page that no table of contents has, a link, a docstring."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import DOCS, ROOT

PACKAGES = ("sphinx", "myst_parser", "furo")


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in PACKAGES), reason=f"needs {', '.join(PACKAGES)}"
)
def test_builds_without_a_warning(tmp_path: Path) -> None:
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-d", str(tmp_path / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path / "html")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    api = (tmp_path / "html" / "reference" / "api.html").read_text()
    assert all(f'id="qtorch.{name}"' in api for name in ("quantize_", "int8_weight_only", "training.qat", "QuantSpec"))
