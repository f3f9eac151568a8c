"""Files of measured tables: which way of multiplying runs for how many rows.

    {"avx512_vnni on AuthenticAMD family 26 with avx512_vnni": {"int8 plain rows small": [[8, "dot"], [null, "tile"]]}}

A table belongs to an instruction set and to the kind of processor that it was measured on. It has a list of [largest
number of rows, way] for each kind and size of the weight, and dtype (`ways.key_of`).
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from pathlib import Path
from typing import Any

from ...files import read_json
from . import build, cache, processor

WAYS = {"dot": 0, "tile": 1, "amx": 2, "fixed": 3, "channels": 4}
"""Ways of the compiled kernels, and their numbers in src/kernels.cpp."""

OTHER_WAYS = ("torch", "float")
"""The kernels made of torch operators, and F.linear on a weight that a compiled kernel dequantized."""

SHIPPED = build.WAYS

MOST_BYTES = 1 << 20
"""Of a file."""

MOST_ROWS = 1 << 30

Steps = list[tuple[int | None, str]]
Table = dict[str, Steps]
Tables = dict[str, dict[str, Table]]
"""By instruction set, and kind of processor."""


def read(path: str | Path) -> Tables:
    """The tables of a file. One without a kind of processor counts as measured on this one.

    Raises:
        ValueError: the file has anything else than tables of ways that its instruction sets have.
    """
    tables: Tables = {}
    content = read_json(path, MOST_BYTES)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got a {type(content).__name__}, want tables by instruction set")
    for name, table in content.items():
        instruction_set, _, kind = name.partition(" on ")
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name}: got a {type(table).__name__}, want lists of steps by name")
        for key, steps in table.items():
            if reason := _wrong(instruction_set, key, steps):
                raise ValueError(f"{path}: {name}: {key}: {reason}")
        tables.setdefault(instruction_set, {})[kind or processor.kind()] = table
    return tables


def _wrong(instruction_set: str, key: str, steps: Any) -> str:
    """Why these are not steps of a kind of weight; empty if they are."""
    got = f"got {str(steps)[:200]}"
    if not isinstance(steps, list) or not steps or any(not isinstance(s, list) or len(s) != 2 for s in steps):
        return f"{got}, want a list of [rows, way]"
    *limits, last = (rows for rows, _ in steps)
    numbers = [rows for rows in limits if type(rows) is int and 0 < rows <= MOST_ROWS]
    if last is not None or len(numbers) < len(limits) or any(a >= b for a, b in itertools.pairwise(numbers)):
        return f"{got}, want [rows, way] with growing numbers of rows, the last with null"
    there = _ways_of(instruction_set, key)
    unknown = [way for _, way in steps if way not in there]
    return f"{got}, want the ways {', '.join(there)}" if unknown else ""


def _ways_of(instruction_set: str, key: str) -> tuple[str, ...]:
    if key.startswith("int8 "):
        return ("dot", "tile", "channels" if "short groups" in key else "torch")
    return ("dot", "tile", "fixed", *(["amx"] if instruction_set == "amx" else []), *OTHER_WAYS)


def write(path: Path, tables: Tables) -> None:
    """Write a file, in one step: who reads it meanwhile reads the old one."""
    parts = []
    for instruction_set, of_set in tables.items():
        for kind, table in of_set.items():
            lists = ",\n".join(f"  {json.dumps(key)}: {json.dumps(steps)}" for key, steps in table.items())
            parts.append(f" {json.dumps(f'{instruction_set} on {kind}')}: {{\n{lists}\n }}")
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text("{\n" + ",\n".join(parts) + "\n}\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def path_of_user() -> Path:
    """Where `calibrate_cpu` writes: beside the user's compiled kernels, a file for each kind of processor, since homes
    are shared between machines.

    Raises:
        RuntimeError: the user has no home directory.
    """
    return cache.folder() / f"ways_{processor.kind().replace(' ', '_').replace('/', '_')}.json"


def of_user() -> Tables:
    """What `calibrate_cpu` wrote for this user and this kind of processor; a file that is not right has no effect."""
    try:
        path = path_of_user()
        if not os.path.lexists(path):
            return {}
        if reason := cache.distrust(path.parent, path):
            raise ValueError(reason)
        tables, kind = read(path), processor.kind()
    except (OSError, RuntimeError, ValueError) as error:
        warnings.warn(f"qtorch: the measured choices of this user are not used: {error}", stacklevel=2)
        return {}
    return {name: {kind: of_set[kind]} for name, of_set in tables.items() if kind in of_set}
