"""The compiled kernels: which build is loaded, and how it is called.

There is one library per instruction set (`build.py`). The best one that this machine runs is loaded at first use: from
the folder beside this file, from an installed copy that a checkout shadows, or from the user's cache, where it is
compiled if it exists nowhere (`cache.py`). Its functions take plain pointers in one struct (`structs.py`) and use
torch's threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..registry import forget_choices
from . import cache
from .build import HERE, LIBRARIES, fingerprint, instruction_sets, library_path, this_machine

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int8: 4, torch.uint8: 5}
"""Numbers of the dtypes, as in src/number.h."""

_AVX2 = ("avx2", "fma3", "f16c", "bmi2")
_AVX512 = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "fma3", "f16c", "bmi2")
_NEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "portable": ("sse4_2",),
        "avx2": _AVX2,
        "avx2_vnni": (*_AVX2, "avx_vnni"),
        "avx512": _AVX512,
        "avx512_vnni": (*_AVX512, "avx512_vnni"),
        "amx": (*_AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    },
    "aarch64": {"dotprod": ("dot",), "i8mm": ("dot", "i8mm")},
}
"""What the instruction sets of `build.FLAGS` need, as `torch.cpu.get_capabilities` names it."""

LISTENERS: list[Callable[[], None]] = []
"""Called once, when a library is first chosen."""

_forced: list[Library | str] = []
_forked, _choosing = False, threading.RLock()


def _after_fork() -> None:
    global _forked, _choosing
    _forked = True
    _choosing = threading.RLock()  # a thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


RUN = (
    "conv", "conv_float", "conv_pool", "attention", "quantize_rows", "quantize_tokens", "dequantize", "quantize_matrix",
    "dequantize_matrix", "block_product", "scale_sums", "adam", "sum_squared_errors", "low_rank_mm",
    "rms_norm", "rotate_halves",
)  # fmt: skip
"""Functions without a result."""

COUNT = (
    "weight_only_mm", "int8_mm", "experts_mm", "experts_int8_mm", "block_sparse_mm", "embed", "conv_pack", "conv_codes",
)  # fmt: skip
"""Functions with an integer as their result."""


class Library:
    """A loaded build; its functions, named in `RUN` and `COUNT`, take a packed struct."""

    def __init__(self, instruction_set: str, path: Path) -> None:
        _share_threads()
        handle = ctypes.CDLL(str(path))
        handle.qtorch_fingerprint.restype = ctypes.c_char_p
        if handle.qtorch_fingerprint().decode() != fingerprint():
            raise OSError(f"{path} is of other sources")
        if not handle.qtorch_ready():
            raise OSError(f"the system does not let this process use {instruction_set}")
        self.instruction_set, self.path = instruction_set, path
        for name in (*RUN, *COUNT):
            function = getattr(handle, f"qtorch_{name}")
            function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64 if name in COUNT else None
            setattr(self, name, function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[[bytes], int]:
            """A function."""


def _share_threads() -> None:
    """Make the OpenMP runtime that torch has loaded visible to our libraries, which are linked without one."""
    try:
        maps = Path("/proc/self/maps").read_text()
        found = re.findall(r"\S*/lib(?:gomp|iomp5|omp)[-.\w]*", maps)
    except OSError:
        found = [str(path) for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*")]
    ctypes.CDLL(found[0] if found else "libgomp.so.1", ctypes.RTLD_GLOBAL)


def runs_here(instruction_set: str) -> bool:
    """Whether this machine has the instructions."""
    if instruction_set not in instruction_sets():
        return False
    capabilities = torch.cpu.get_capabilities()
    return all(capabilities.get(name) for name in _NEEDS.get(this_machine(), {}).get(instruction_set, ()))


def installed() -> list[Path]:
    """Folders of libraries made at installation: that of this package, and those of the copies that it shadows, as a
    checkout shadows what pip installed. QTORCH_CPU_LIBRARIES names a single folder instead."""
    if os.environ.get("QTORCH_CPU_LIBRARIES"):
        return [LIBRARIES]
    own = HERE.parents[2].absolute()
    # Only entries after the imported copy, and none that depends on the working directory.
    path = [Path(entry) for entry in sys.path if os.path.isabs(entry)]
    behind = path[path.index(own) + 1 :] if own in path else path
    copies = (entry / HERE.absolute().relative_to(own) / "lib" for entry in behind)
    return list(dict.fromkeys([LIBRARIES.absolute(), *filter(Path.is_dir, copies)]))


@functools.cache
def _load(path: Path, instruction_set: str) -> Library | str:
    """The library, or why it cannot be loaded."""
    try:
        return Library(instruction_set, path)
    except (OSError, AttributeError) as error:
        return str(error)


def _installed(instruction_set: str) -> Library | str:
    reason = "it is not built"
    for directory in installed():
        path = library_path(instruction_set, directory)
        if path.exists():
            found = _load(path, instruction_set)
            if isinstance(found, Library):
                return found
            reason = found
    return reason


def _of_user(instruction_set: str, may_compile: bool) -> Library | str:
    if os.environ.get("QTORCH_CPU_LIBRARIES"):
        return ""
    # A forked child does not compile: it lacks its parent's threads and locks, and may have little time.
    look = cache.find_or_compile if may_compile and not _forked else cache.find
    path, reason = look(instruction_set)
    return _load(path, instruction_set) if path else reason


def find(instruction_set: str) -> Library | str:
    """The library of an instruction set if one of these sources exists, else why not; nothing is compiled."""
    found = _installed(instruction_set)
    if isinstance(found, str):
        found = _of_user(instruction_set, may_compile=False) or found
    return found


@functools.cache
def _best() -> Library | str:
    if os.environ.get("QTORCH_CPU_KERNELS") == "0":
        return "is switched off by QTORCH_CPU_KERNELS=0"
    with _choosing:
        found = _choose()
    while LISTENERS and isinstance(found, Library):
        LISTENERS.pop()()  # which may ask for the library
    return found


@functools.cache
def _choose() -> Library | str:
    wanted = os.environ.get("QTORCH_CPU_ISA")
    names = [wanted] if wanted else list(reversed(instruction_sets()))
    reasons = dict.fromkeys(names, "this machine does not have it")
    names = [name for name in names if name in instruction_sets() and runs_here(name)]
    # Installation tried to build all of them; those that failed are not tried again.
    for look in (_installed, functools.partial(_of_user, may_compile=True)):
        for name in names:
            found = look(name)
            if isinstance(found, Library):
                return found
            reasons[name] = found or reasons[name]
    why = {reason: ", ".join(name for name in reasons if reasons[name] == reason) for reason in reasons.values()}
    warnings.warn(
        "qtorch: the compiled CPU kernels are not there, so slower ones run; `python -m qtorch.kernels.cpu` "
        f"compiles them ({'; '.join(f'{names}: {reason}' for reason, names in why.items())})",
        stacklevel=2,
    )
    return "is not compiled: python -m qtorch.kernels.cpu"


def library() -> Library | None:
    """The library in use, or None; `missing` says why."""
    found = _forced[-1] if _forced else _best()
    return found if isinstance(found, Library) else None


def missing() -> str | None:
    """Why no library is in use; None if one is."""
    found = _forced[-1] if _forced else _best()
    return found if isinstance(found, str) else None


@contextmanager
def use(instruction_set: str | None) -> Iterator[None]:
    """Use the library for `instruction_set`, or with None no compiled kernel, inside the ``with`` block, for tests and
    measurements. Raises `ValueError` if this machine does not have it, or it is not built."""
    found: Library | str = "is switched off"
    if instruction_set is not None:
        if instruction_set not in instruction_sets() or not runs_here(instruction_set):
            raise ValueError(f"this machine does not run {instruction_set}")
        found = find(instruction_set)
        if isinstance(found, str):
            raise ValueError(f"{instruction_set}: {found}")
    _forced.append(found)
    forget_choices()
    while LISTENERS and isinstance(found, Library):
        LISTENERS.pop()()
    try:
        yield
    finally:
        _forced.pop()
        forget_choices()


def threads() -> int:
    """Threads that a kernel may use: torch's; in a forked child one, because it lacks its parent's pool."""
    return 1 if _forked else torch.get_num_threads()
