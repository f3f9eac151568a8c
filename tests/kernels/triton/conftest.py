"""The Triton kernels on the GPU where there is one, else in the interpreter on CPU."""

import pytest
import torch

pytest.importorskip("triton")

if not torch.cuda.is_available():
    from tests.kernels.triton.interpreter import install

    install()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
