"""Which way of multiplying runs for how many rows: a measured table.

`ways.json` has a list of (largest number of rows, way) per instruction set, kind and size of the weight, and dtype.
Weight-only layers have a second list, "copied", which applies where a dequantized copy of the weight may be kept (see
`float_copies`). `measure_cpu_ways` repeats the measurement and writes such a file, which QTORCH_CPU_CHOICES or `load`
selects.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...generation import generation

WAYS = {"dot": 0, "tile": 1, "amx": 2, "fixed": 3, "channels": 4}
"""Ways of the compiled kernels, and their numbers in src/kernels.cpp."""

OTHER_WAYS = ("torch", "float")
"""The kernels made of torch operators, and F.linear on a weight that a compiled kernel dequantized."""

SMALL = 1 << 20
"""Most elements of a small weight, which stays in cache together with most of what it is multiplied with."""

Table = dict[str, dict[str, list[tuple[int | None, str]]]]

_choices: Table = {}
_forced: list[str] = []


def load(path: str | Path) -> None:
    """Use the table of a file that `measure_cpu_ways` wrote; instruction sets and kinds that it lacks keep theirs.

    Raises:
        ValueError: the file is not such a table.
    """
    read = json.loads(Path(path).read_text())
    for table in read.values():
        for key, steps in table.items():
            if not steps or steps[-1][0] is not None or any(way not in (*WAYS, *OTHER_WAYS) for _, way in steps):
                raise ValueError(f"{path}: {key}: got {steps}, want [rows, way], the last with null")
    for instruction_set, table in read.items():
        _choices.setdefault(instruction_set, {}).update(table)
    _find.cache_clear()
    generation.end()


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


def steps(instruction_set: str, key: str) -> list[tuple[int | None, str]]:
    """(largest number of rows, way), the last without a limit."""
    return [(None, _forced[-1])] if _forced else _steps(instruction_set, key)


def _steps(instruction_set: str, key: str) -> list[tuple[int | None, str]]:
    if not _choices:
        load(Path(__file__).with_name("ways.json"))
        if own := os.environ.get("QTORCH_CPU_CHOICES"):
            load(own)
    return _choices[instruction_set][key]


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
