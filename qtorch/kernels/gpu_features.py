"""What this process can run on CUDA, as far as the choice of a kernel depends on it."""

from __future__ import annotations

import functools
import importlib.util

import torch


def missing(feature: str) -> str | None:
    """Why `feature` is not there, None if it is: ``"triton"``, or ``"float8"``, products of float8 (compute capability
    8.9 and up). Without a GPU the answer is that of a current one."""
    return _missing(feature)


# What torch.compiler.assume_constant_result sets: a compiler that traces takes the answer for a constant.
missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _missing(feature: str) -> str | None:
    if feature == "triton":
        return None if _importable("triton") else "needs triton, which is not installed"
    if torch.version.hip:
        return "runs on CUDA"
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    return None if capability >= (8, 9) else f"needs compute capability 8.9, the GPU has {capability}"


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # sys.modules has None there: it was blocked
        return False


def runs_triton(x: torch.Tensor) -> bool:
    """Whether the Triton kernels take this tensor."""
    return x.device.type == "cuda" and missing("triton") is None
