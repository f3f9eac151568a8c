"""The compiled libraries that this machine can run."""

import pytest

from qtorch.kernels.cpu import compiled_library
from qtorch.kernels.cpu.build import instruction_sets

BUILDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not compiled_library.runs_here(name) or isinstance(compiled_library.find(name), str),
            reason=f"no {name} here",
        ),
    )
    for name in instruction_sets()
]

NEEDS_LIBRARY = pytest.mark.skipif(compiled_library.library() is None, reason="nothing is built")
