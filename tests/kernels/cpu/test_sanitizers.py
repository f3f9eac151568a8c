"""The best build of this machine under the address and undefined-behaviour sanitizers; `make asan` runs all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qtorch.kernels.cpu import build, compiled_library
from tests.kernels.cpu.builds import NEEDS_LIBRARY


def has_sanitizers() -> bool:
    """Whether the compiler is gcc, and its address sanitizer is installed."""
    compiler = build.find_compiler()
    if compiler is None:
        return False
    found = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    return Path(found.stdout.strip()).is_absolute()


@pytest.mark.slow
@NEEDS_LIBRARY
@pytest.mark.skipif(not has_sanitizers(), reason="needs gcc and its address sanitizer")
def test_no_errors():
    script = Path(__file__).with_name("sanitize.sh")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"SANITIZE_SETS": compiled_library.library().instruction_set, "SANITIZE_ONCE": "1"}
    environment["SANITIZE_SECONDS"] = "2400"
    done = subprocess.run(
        ["bash", script, sys.executable], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
