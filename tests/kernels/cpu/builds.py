"""The compiled libraries that this machine can run, and layers that run in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qtorch.kernels.cpu import build, compiled_library


def _marks(name: str) -> list[pytest.MarkDecorator]:
    """The fast part of the tests takes the library that is in use."""
    missing = not compiled_library.runs_here(name) or isinstance(compiled_library.find(name), str)
    found = compiled_library.library()
    in_use = found is not None and found.instruction_set == name
    return [pytest.mark.skipif(missing, reason=f"no {name} here"), *([] if in_use else [pytest.mark.slow])]


BUILDS = [pytest.param(name, marks=_marks(name)) for name in build.instruction_sets()]

NEEDS_LIBRARY = pytest.mark.skipif(compiled_library.library() is None, reason="nothing is built")

ROOT = Path(__file__).parents[3]
LAYER = """
import torch, qtorch
layer = torch.nn.Linear(64, 64)
qtorch.quantize_(layer, qtorch.int8_weight_only())
with qtorch.kernels.record_kernels() as ran:
    layer(torch.randn(3, 64))
print(ran)
print(qtorch.explain(layer))
"""


def run(program: str = LAYER, **environment: str) -> subprocess.CompletedProcess[str]:
    """What became of a Python program, by default one that says which kernels a layer runs, and why."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
