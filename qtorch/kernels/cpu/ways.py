"""Which way of multiplying runs for how many rows: a measured table.

A table has a list of (largest number of rows, way) for each kind and size of the weight, and dtype. Weight-only layers
have a second list, "copied", which applies where a dequantized copy of the weight may be kept (see `float_copies`).

Tables lie in files (`ways_file.py`), which are asked in turn: what `load` was given, the file that QTORCH_CPU_CHOICES
names, the one that `calibrate_cpu` wrote for this user, and `ways.json`; in each the table of this kind of processor
first, then one of this vendor.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...generation import generation
from . import processor
from .compiled_library import library
from .ways_file import OTHER_WAYS as OTHER_WAYS
from .ways_file import SHIPPED, Steps, Table, Tables, of_user, read
from .ways_file import WAYS as WAYS

SMALL = 1 << 20
"""Most elements of a small weight, which stays in cache together with most of what it is multiplied with."""

LIKE = {"dotprod": "avx2_vnni", "i8mm": "avx2_vnni"}
"""Instruction sets that nobody has measured, and whose choices they take: that of the most similar instructions."""

_loaded: Tables = {}
_forced: list[str] = []


def load(path: str | Path) -> None:
    """Use the tables of a file that `calibrate_cpu` wrote; instruction sets and kinds that it lacks keep theirs.

    Raises:
        ValueError: the file is not such a table.
    """
    for instruction_set, tables in read(path).items():
        _loaded.setdefault(instruction_set, {}).update(tables)
    forget()


def forget() -> None:
    """Read the files again at the next choice."""
    _tables.cache_clear()
    _find.cache_clear()
    generation.end()


@functools.cache
def _tables(instruction_set: str) -> list[tuple[str, Table]]:
    """(kind of processor, table), in the order in which they are asked."""
    here = processor.kind()
    own = os.environ.get("QTORCH_CPU_CHOICES")
    found = []
    for tables in (_loaded, read(own) if own else {}, of_user(), read(SHIPPED)):
        of_set = (tables.get(instruction_set) or tables.get(LIKE.get(instruction_set, ""), {})).items()
        found += sorted(of_set, key=lambda item: (item[0] != here, processor.vendor(item[0]) != processor.vendor(here)))
    return found


def advice() -> str | None:
    """What to do where the choices in use were measured on another kind of processor."""
    compiled = library()
    measured_on = _tables(compiled.instruction_set)[0][0] if compiled else processor.kind()
    if measured_on == processor.kind():
        return None
    return (
        f"which kernel is fastest for how many rows was measured on another processor ({measured_on}; this is "
        f"{processor.kind()}): qtorch.calibrate_cpu() measures it on this one, once, in about a minute"
    )


@functools.cache
def key_of(
    activation: str | torch.dtype, packed: bool, grouped: bool, elements: int, short_groups: bool = False
) -> str:
    """Key of the table: dtype of the activation (int8, or that of a weight-only layer), form and size of the weight.

    Args:
        short_groups: whether an int8 activation may be multiplied by "channels" (`weight.has_short_groups`).
    """
    name, size = str(activation).removeprefix("torch."), "small" if elements <= SMALL else "large"
    groups = "short groups" if short_groups and name == "int8" else "groups" if grouped else "rows"
    return f"{name} {'packed' if packed else 'plain'} {groups} {size}"


def choose(instruction_set: str, key: str, rows: int) -> str:
    """The way for this many rows."""
    return _forced[-1] if _forced else _find(instruction_set, key, rows)


def steps(instruction_set: str, key: str) -> Steps:
    """(largest number of rows, way), the last without a limit."""
    return [(None, _forced[-1])] if _forced else _steps(instruction_set, key)


def table(instruction_set: str) -> Table:
    """`steps` by key."""
    return {key: steps for _, part in reversed(_tables(instruction_set)) for key, steps in part.items()}


def forced() -> str | None:
    """The way of the innermost `force`."""
    return _forced[-1] if _forced else None


def _steps(instruction_set: str, key: str) -> Steps:
    return next(table[key] for _, table in _tables(instruction_set) if key in table)


@functools.lru_cache(maxsize=4096)
def _find(instruction_set: str, key: str, rows: int) -> str:
    for largest, way in _steps(instruction_set, key):
        if largest is None or rows <= largest:
            return way
    raise AssertionError("the last step has no limit")


@contextmanager
def force(way: str) -> Iterator[None]:
    """Use this way inside the ``with`` block, for tests and measurements.

    Raises:
        ValueError: no way has that name.
    """
    if way not in (*WAYS, *OTHER_WAYS):
        raise ValueError(f"there is no way {way!r}; there are {', '.join((*WAYS, *OTHER_WAYS))}")
    _forced.append(way)
    generation.end()
    try:
        yield
    finally:
        _forced.pop()
        generation.end()
