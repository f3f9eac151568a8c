"""Which way of multiplying is taken for how many rows: measured, per instruction set, kind and size of weight, dtype.

`ways.json` has, for each of those, a list of (largest number of rows, way); of weight-only layers a second one,
"copied", for where a dequantized copy of the weight may be kept (see `float_copies`). `measure_cpu_ways` measures them
anew; the file that it writes is used where QTORCH_CPU_CHOICES names it, or after `load`.
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

WAYS = {"dot": 0, "tile": 1, "amx": 2, "fixed": 3}
"""Ways of the compiled kernels, and their numbers in src/kernels.cpp."""

OTHER_WAYS = ("torch", "float")
"""The kernels made of torch operators, and F.linear on the weight that a compiled kernel has dequantized."""

SMALL = 1 << 20
"""Elements of a weight that counts as small: it, and most of what it is multiplied with, stays in cache."""

Choices = dict[str, dict[str, list[tuple[int | None, str]]]]

_choices: Choices = {}
_forced: list[str] = []


def load(path: str | Path) -> None:
    """Use the choices of a file that `measure_cpu_ways` wrote; those for instruction sets that it lacks stay.

    Raises:
        ValueError: the file has something else.
    """
    read = json.loads(Path(path).read_text())
    for table in read.values():
        for key, steps in table.items():
            if not steps or steps[-1][0] is not None or any(way not in (*WAYS, *OTHER_WAYS) for _, way in steps):
                raise ValueError(f"{path}: {key}: got {steps}, want [rows, way], the last with null")
    _choices.update(read)
    _find.cache_clear()
    generation.end()


@functools.cache
def key_of(activation: str | torch.dtype, packed: bool, grouped: bool, elements: int) -> str:
    """Name of a kind of problem: dtype of the activation, int8 or that of a weight-only layer; form and size of the
    weight."""
    name, size = str(activation).removeprefix("torch."), "small" if elements <= SMALL else "large"
    return f"{name} {'packed' if packed else 'plain'} {'groups' if grouped else 'rows'} {size}"


def choose(instruction_set: str, key: str, rows: int) -> str:
    """The way for this many rows."""
    return _forced[-1] if _forced else _find(instruction_set, key, rows)


@functools.lru_cache(maxsize=4096)
def _find(instruction_set: str, key: str, rows: int) -> str:
    if not _choices:
        load(Path(__file__).with_name("ways.json"))
        if own := os.environ.get("QTORCH_CPU_CHOICES"):
            load(own)
    for largest, way in _choices[instruction_set][key]:
        if largest is None or rows <= largest:
            return way
    raise AssertionError("the last step has no limit")


@contextmanager
def force(way: str) -> Iterator[None]:
    """Take this way inside the ``with`` block, for tests and measurements.

    Raises:
        ValueError: there is no such way.
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
