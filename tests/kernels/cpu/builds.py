"""The compiled libraries that this machine can run."""

import pytest

from qtorch.kernels.cpu import compiled_library
from qtorch.kernels.cpu.build import instruction_sets


def _marks(name: str) -> list[pytest.MarkDecorator]:
    """The fast part of the tests takes the library that is in use."""
    missing = not compiled_library.runs_here(name) or isinstance(compiled_library.find(name), str)
    found = compiled_library.library()
    in_use = found is not None and found.instruction_set == name
    return [pytest.mark.skipif(missing, reason=f"no {name} here"), *([] if in_use else [pytest.mark.slow])]


BUILDS = [pytest.param(name, marks=_marks(name)) for name in instruction_sets()]

NEEDS_LIBRARY = pytest.mark.skipif(compiled_library.library() is None, reason="nothing is built")
