"""The compiled kernels: which build is loaded, and how it is called.

There is one library per instruction set (`build.py`); the best that this machine runs is loaded at first use. They take
plain pointers in one struct, and share the threads of torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..registry import forget_choices
from .build import fingerprint, instruction_sets, library_path

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int8: 4, torch.uint8: 5}
"""Numbers of the dtypes, as in src/number.h."""

_NEEDS = {
    "portable": ("sse4_2",),
    "avx2": ("avx2", "fma3", "f16c", "bmi2"),
    "avx2_vnni": ("avx2", "fma3", "f16c", "bmi2", "avx_vnni"),
    "avx512": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "fma3", "f16c", "bmi2"),
    "avx512_vnni": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "fma3", "f16c", "bmi2", "avx512_vnni"),
    "amx": ("avx512_bw", "avx512_dq", "avx512_vl", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
}

_forced: list[Library | str] = []
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Library:
    """A loaded build; its functions take a packed struct."""

    def __init__(self, instruction_set: str) -> None:
        path = library_path(instruction_set)
        _share_threads()
        handle = ctypes.CDLL(str(path))
        handle.qtorch_fingerprint.restype = ctypes.c_char_p
        if handle.qtorch_fingerprint().decode() != fingerprint():
            raise OSError(f"{path.name} is of other sources")
        if not handle.qtorch_ready():
            raise OSError(f"the system does not let this process use {instruction_set}")
        self.instruction_set = instruction_set
        self.weight_only_mm = handle.qtorch_weight_only_mm
        self.int8_mm = handle.qtorch_int8_mm
        self.quantize_rows = handle.qtorch_quantize_rows
        self.dequantize = handle.qtorch_dequantize
        for function in (self.weight_only_mm, self.int8_mm, self.quantize_rows, self.dequantize):
            function.argtypes, function.restype = [ctypes.c_char_p], None
        self.embed = handle.qtorch_embed
        self.embed.argtypes, self.embed.restype = [ctypes.c_char_p], ctypes.c_int64


def _share_threads() -> None:
    """Make the OpenMP runtime that torch has loaded known to our libraries, which are linked to none."""
    try:
        maps = Path("/proc/self/maps").read_text()
        found = re.findall(r"\S*/lib(?:gomp|iomp5|omp)[-.\w]*", maps)
    except OSError:
        found = [str(path) for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*")]
    ctypes.CDLL(found[0] if found else "libgomp.so.1", ctypes.RTLD_GLOBAL)


def runs_here(instruction_set: str) -> bool:
    """Whether this machine has the instructions."""
    if instruction_sets().keys() == {"portable"}:
        return instruction_set == "portable"
    capabilities = torch.cpu.get_capabilities()
    return all(capabilities.get(name) for name in _NEEDS[instruction_set])


@functools.cache
def _load(instruction_set: str) -> Library | str:
    """The library, or why it cannot be had."""
    if not library_path(instruction_set).exists():
        return "it is not built"
    try:
        return Library(instruction_set)
    except (OSError, AttributeError) as error:
        return str(error)


@functools.cache
def _best() -> Library | str:
    if os.environ.get("QTORCH_CPU_KERNELS") == "0":
        return "is switched off by QTORCH_CPU_KERNELS=0"
    wanted = os.environ.get("QTORCH_CPU_ISA")
    reasons = []
    for name in [wanted] if wanted else reversed(instruction_sets()):
        if name not in instruction_sets() or not runs_here(name):
            reasons.append(f"{name}: this machine does not have it")
            continue
        found = _load(name)
        if isinstance(found, Library):
            return found
        reasons.append(f"{name}: {found}")
    warnings.warn(
        "qtorch: the compiled CPU kernels are not there, so slower ones run; `python -m qtorch.kernels.cpu` "
        f"compiles them ({'; '.join(reasons)})",
        stacklevel=2,
    )
    return "is not compiled: python -m qtorch.kernels.cpu"


def library() -> Library | None:
    """The library in use, None if there is none; `missing` says why."""
    found = _found()
    return found if isinstance(found, Library) else None


def missing() -> str | None:
    """Why there is no library; None if there is one."""
    found = _found()
    return found if isinstance(found, str) else None


def _found() -> Library | str:
    return _forced[-1] if _forced else _best()


@contextmanager
def use(instruction_set: str | None) -> Iterator[None]:
    """Run the build for `instruction_set`, or with None no compiled kernel, inside the ``with`` block; for tests and
    measurements.

    Raises:
        ValueError: this machine does not have it, or it is not built.
    """
    found: Library | str = "is switched off"
    if instruction_set is not None:
        if instruction_set not in instruction_sets() or not runs_here(instruction_set):
            raise ValueError(f"this machine does not run {instruction_set}")
        found = _load(instruction_set)
        if isinstance(found, str):
            raise ValueError(f"{instruction_set}: {found}")
    _forced.append(found)
    forget_choices()
    try:
        yield
    finally:
        _forced.pop()
        forget_choices()


def threads() -> int:
    """Threads that a kernel may use: torch's; one in a forked child, which has none of its parent's pool."""
    return 1 if _forked else torch.get_num_threads()
