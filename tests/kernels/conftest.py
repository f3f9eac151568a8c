"""Fixtures of the tests of kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch

from qtorch.kernels.cpu import compiled_library
from tests.kernels.cpu.builds import BUILDS


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set in use, each that this machine runs."""
    with compiled_library.use(request.param):
        yield request.param


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """`torch.set_num_threads`, undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
