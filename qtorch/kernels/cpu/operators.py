"""Operators that torch's dispatcher calls in C++: compiled graphs then run them without Python.

`src/operators.cpp` registers implementations for CPU tensors of some operators that are defined in Python, through
torch's stable C ABI. They choose the library and the variant as Python does, and pass calls that they do not support on
to Python. Without the library, or with a torch that lacks a function, the implementations in Python run. Fake
implementations, vmap and everything else stay in Python.

The library is attached when the library of kernels is first chosen, never at import.
"""

import ctypes
import itertools
import json
from pathlib import Path

import torch

from .. import config, custom_ops
from . import compiled_library, float_copies, variants
from .build import OPERATORS, fingerprint, library_path

_Listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_Strings = (ctypes.c_char_p,) * 4

_attached: list[ctypes.CDLL] = []
_reasons: list[str] = []
_told: list[tuple[object, ...]] = []  # what the library was told last


@_Listener
def _note(name: bytes) -> None:
    custom_ops.note(name.decode())


def cpu_operators_library() -> Path:
    """The library with the operators of quantized layers on CPU, for programs without Python that run a package of
    AOTInductor: they open it with ``dlopen`` and call ``const char* qtorch_load()``, which returns null or what went
    wrong. Copy it together with the libraries ``libqtorch_*.so`` beside it.

    Raises:
        RuntimeError: the kernels are not compiled.
    """
    if (found := compiled_library.library()) is None:
        raise RuntimeError(f"the CPU kernels are not there: this process {compiled_library.missing()}")
    path = library_path(OPERATORS, found.path.parent)
    if not _attached:
        raise RuntimeError(f"{path} cannot be used: {'; '.join(_reasons)}")
    return path


def attached() -> bool:
    """Whether the implementations in C++ are registered."""
    return bool(_attached)


def calls() -> int:
    """Calls that ran in C++."""
    return _attached[0].qtorch_calls() if _attached else 0


def _open(path: Path) -> ctypes.CDLL:
    """The library, ready to be attached; an `OSError` if it cannot be loaded, or is of other sources."""
    library = ctypes.CDLL(str(path))
    library.qtorch_fingerprint.restype = ctypes.c_char_p
    if library.qtorch_fingerprint().decode() != fingerprint():
        raise OSError(f"{path} is of other sources")
    library.qtorch_calls.restype = ctypes.c_int64
    library.qtorch_schema.restype = library.qtorch_attach.restype = library.qtorch_use.restype = ctypes.c_char_p
    library.qtorch_use.argtypes = [*_Strings, ctypes.c_int]
    return library


def _schemas(library: ctypes.CDLL) -> list[str]:
    found = itertools.takewhile(bool, map(library.qtorch_schema, itertools.count()))
    return [schema.decode() for schema in found]


def _attach() -> None:
    """Register the implementations in C++ with the library beside the one of kernels that the process has chosen."""
    found = compiled_library.library()
    if found is None or _attached:
        return
    try:
        library = _open(library_path(OPERATORS, found.path.parent))
    except (OSError, AttributeError) as error:
        _reasons.append(str(error))
        return
    for schema in _schemas(library):
        name = schema.partition("(")[0]
        own = str(getattr(torch.ops.qtorch, name).default._schema)
        assert own == f"qtorch::{schema}", f"{own} is qtorch::{schema} in src/operators.cpp"
        custom_ops.define_fallback(name)
    if reason := library.qtorch_attach():
        _reasons.append(reason.decode())
        return
    _attached.append(library)
    _refresh()
    _listen(custom_ops.recording())


def _refresh() -> None:
    """Tell the operators which library is in use, and what chooses its variants."""
    if not _attached:
        return
    found, nothing = compiled_library.library(), (None, None, None, None, 0)
    state: tuple[object, ...] = nothing
    if found is not None:
        name = found.instruction_set
        words = (str(found.path), name, json.dumps({name: variants.table(name)}), variants.forced() or "")
        state = (*(word.encode() for word in words), float_copies.wanted())
    if _told[-1:] == [state]:
        return
    _told[:] = [state]
    if error := _attached[0].qtorch_use(*state):
        _attached[0].qtorch_use(*nothing)
        _reasons.append(error.decode())


def _listen(recording: bool) -> None:
    if _attached:
        _attached[0].qtorch_listen(_note if recording else None)


compiled_library.LISTENERS.append(_attach)
config.generation.listeners.append(_refresh)
custom_ops.RECORD_LISTENERS.append(_listen)
