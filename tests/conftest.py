"""Settings of the whole suite: few threads a worker; without a GPU, GPU tests are skipped and Triton interprets."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
THREADS = max(1, (os.cpu_count() or 1) // WORKERS)
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
# Tests compile no CPU kernels into the cache of whoever runs them.
os.environ.setdefault("QTORCH_CPU_BUILD", "0")

import pytest
import torch

from qtorch.primitives.discovery import import_later

import_later()  # tests iterate over all recipes

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which some tests of the compiler do first.
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(THREADS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Where no C++ compiler is installed, what torch.compile asks it for is not there to be tested."""
    try:
        return (yield)
    except Exception as error:
        if "InvalidCxxCompiler" in str(error):
            pytest.skip("torch.compile needs a C++ compiler")
        raise


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Graphs and recompilation limits of one test do not reach the next."""
    torch.compiler.reset()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a checkpoint in one file, which is not there yet."""
    return tmp_path / "model.safetensors"


def _as_usual(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory function that takes the defaults of the process as they are for callers in the package alone."""

    @functools.wraps(make)
    def made(*args: object, **kwargs: object) -> torch.Tensor:
        if sys._getframe(1).f_globals["__name__"].startswith("qtorch"):
            return make(*args, **kwargs)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return make(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return made


FACTORIES = ("arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "tensor", "zeros")


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """QTORCH_TEST_DEFAULT_DTYPE is the default dtype that the package finds, by default torch's own."""
    name = os.environ.get("QTORCH_TEST_DEFAULT_DTYPE")
    if name is None:
        yield
        return
    # Not the fixture `monkeypatch`, which would then be undone after those that tests set up before it.
    with pytest.MonkeyPatch.context() as patch:
        for factory in FACTORIES:
            patch.setattr(torch, factory, _as_usual(getattr(torch, factory)))
        torch.set_default_dtype(getattr(torch, name))
        yield
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def torch_kernels() -> Iterator[None]:
    """No compiled kernels: those made of torch operators run."""
    from qtorch.kernels.cpu import compiled_library

    with compiled_library.use(None):
        yield


@pytest.fixture(params=["compiled", "torch"])
def each_library(request: pytest.FixtureRequest) -> Iterator[str]:
    """With the compiled kernels, where there are any, and without."""
    from qtorch.kernels.cpu import compiled_library

    with compiled_library.use(None) if request.param == "torch" else contextlib.nullcontext():
        yield request.param
