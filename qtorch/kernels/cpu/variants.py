"""Which variant of the compiled kernels runs for how many rows: measured tables.

A table belongs to an instruction set and to the kind of processor that it was measured on. It has a list of
[largest number of rows, variant] for each kind and size of the weight, and dtype (`key_of`):

    {"avx512_vnni on AuthenticAMD family 26 with avx512_vnni": {"int8 plain rows small": [[8, "dot"], [null, "tile"]]}}

Weight-only layers have a second list, "copied", which applies where a dequantized copy of the weight may be kept (see
`float_copies`). The tables are asked in turn: what `load` was given, the file that QTORCH_CPU_CHOICES names, the one
that `tune_cpu` wrote for this user, and `variants.json`; in each the table of this kind of processor first, then one of
this vendor.
"""

import functools
import itertools
import json
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...primitives.files import read_json
from .. import features
from ..config import generation
from . import build, cache, compiled_library

CPUINFO = Path("/proc/cpuinfo")


VARIANTS = {"dot": 0, "tile": 1, "amx": 2, "fixed": 3, "channels": 4}
"""Variants of the compiled kernels, and their numbers in src/calls.h."""

OTHER_VARIANTS = ("torch", "float")
"""The kernels made of torch operators, and F.linear on a weight that a compiled kernel dequantized."""

SHIPPED = build.VARIANT_TABLES
MOST_BYTES = 1 << 20  # of a file
MOST_ROWS = 1 << 30
SMALL = (
    1 << 20
)  # most elements of a small weight, which stays in cache together with most of what it is multiplied with
LIKE = {"dotprod": "avx2_vnni", "i8mm": "avx2_vnni"}
"""Instruction sets that nobody has measured, and those with the most similar instructions, whose choices they take."""

Steps = list[tuple[int | None, str]]
Table = dict[str, Steps]
Tables = dict[str, dict[str, Table]]
"""By instruction set, and kind of processor."""

_loaded: Tables = {}
_forced: list[str] = []


@functools.cache
def processor_kind() -> str:
    """Vendor and family, and the best instruction set, which tells apart what a vendor sells under one family number:
    ``"AuthenticAMD family 26 with avx512_vnni"``."""
    best = next((name for name in reversed(build.instruction_sets()) if compiled_library.runs_here(name)), "portable")
    return f"{_vendor_and_family()} with {best}"


def _vendor_and_family() -> str:
    try:
        lines = CPUINFO.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    for of_vendor, of_family in (("vendor_id", "cpu family"), ("CPU implementer", "CPU part")):
        if of_vendor in fields and of_family in fields:
            return f"{fields[of_vendor]} family {fields[of_family]}"
    return platform.processor() or platform.machine() or "unknown"


def read(path: str | Path) -> Tables:
    """The tables of a file. One without a kind of processor counts as measured on this one. Raises `ValueError` if the
    file has anything else than tables of variants that its instruction sets have."""
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
        tables.setdefault(instruction_set, {})[kind or processor_kind()] = table
    return tables


def _wrong(instruction_set: str, key: str, steps: Any) -> str:
    """Why these are not steps of a kind of weight; empty if they are."""
    got = f"got {str(steps)[:200]}"
    if not isinstance(steps, list) or not steps or any(not isinstance(s, list) or len(s) != 2 for s in steps):
        return f"{got}, want a list of [rows, variant]"
    *limits, last = (rows for rows, _ in steps)
    numbers = [rows for rows in limits if type(rows) is int and 0 < rows <= MOST_ROWS]
    if last is not None or len(numbers) < len(limits) or any(a >= b for a, b in itertools.pairwise(numbers)):
        return f"{got}, want [rows, variant] with growing numbers of rows, the last with null"
    there = ["dot", "tile", "fixed", *(["amx"] if instruction_set == "amx" else []), *OTHER_VARIANTS]
    if key.startswith("int8 "):
        there = ["dot", "tile", "channels" if "short groups" in key else "torch"]
    unknown = [variant for _, variant in steps if variant not in there]
    return f"{got}, want the variants {', '.join(there)}" if unknown else ""


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
    """Where `tune_cpu` writes: beside the user's compiled kernels, a file for each kind of processor, since homes
    are shared between machines. A `RuntimeError` if the user has no home directory."""
    return cache.folder() / f"variants_{processor_kind().replace(' ', '_').replace('/', '_')}.json"


def of_user() -> Tables:
    """What `tune_cpu` wrote for this user and this kind of processor; a file that is not right has no effect."""
    try:
        path = path_of_user()
        if not os.path.lexists(path):
            return {}
        if reason := cache.distrust(path.parent, path):
            raise ValueError(reason)
        tables, kind = read(path), processor_kind()
    except (OSError, RuntimeError, ValueError) as error:
        warnings.warn(f"qtorch: the measured choices of this user are not used: {error}", stacklevel=2)
        return {}
    return {name: {kind: of_set[kind]} for name, of_set in tables.items() if kind in of_set}


@functools.cache
def of_values(instruction_set: str) -> Table:
    """Of weights whose codes are no integers, on every machine; nothing else is copied. Tiles multiply in fp32, which
    is slower than `F.linear` of bf16 where the processor has such products, and slower still than matrix tiles."""
    tile = "amx" if instruction_set == "amx" else "tile"
    many = "float" if tile == "tile" and features.cpu_has("bf16") else tile
    table: Table = {}
    for dtype, few, last in (("float32", 8, tile), ("bfloat16", 4 if tile == "amx" else 8, many), ("float16", 8, tile)):
        table[f"values {dtype}"] = [(few, "dot"), (None, last)]
        table[f"units {dtype}"] = [(2, "fixed"), *table[f"values {dtype}"]]  # integers times a unit
        table[f"vectors {dtype}"] = [(2 if dtype == "float32" else 4, "fixed"), *table[f"values {dtype}"]]
    return table


def load(path: str | Path) -> None:
    """Use the tables of a file that `tune_cpu` wrote; instruction sets and kinds that it lacks keep theirs. Raises
    `ValueError` as `read` does."""
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
    here, own = processor_kind(), os.environ.get("QTORCH_CPU_CHOICES")
    vendor, found = f"{here.partition(' ')[0]} ", []
    for tables in (_loaded, read(own) if own else {}, of_user(), read(SHIPPED)):
        of_set = (tables.get(instruction_set) or tables.get(LIKE.get(instruction_set, ""), {})).items()
        found += sorted(of_set, key=lambda item: (item[0] != here, not f"{item[0]} ".startswith(vendor)))
    return [*found, ("", of_values(instruction_set))]


def advice() -> str | None:
    """What to do where the choices in use were measured on another kind of processor."""
    compiled = compiled_library.library()
    measured_on = _tables(compiled.instruction_set)[0][0] if compiled else processor_kind()
    if measured_on == processor_kind():
        return None
    return (
        f"which kernel is fastest for how many rows was measured on another processor ({measured_on}; this is "
        f"{processor_kind()}): qtorch.tune_cpu() measures it on this one, once, in about a minute"
    )


@functools.cache
def key_of(activation: str | torch.dtype, packed: bool, grouped: bool, numel: int, short_groups: bool = False) -> str:
    """Key of the table: dtype of the activation (int8, or that of a weight-only layer), form and size of the weight.
    With short groups an int8 activation may be multiplied by "channels" (`weight.has_short_groups`)."""
    name, size = str(activation).removeprefix("torch."), "small" if numel <= SMALL else "large"
    groups = "short groups" if short_groups and name == "int8" else "groups" if grouped else "rows"
    return f"{name} {'packed' if packed else 'plain'} {groups} {size}"


def choose(instruction_set: str, key: str, rows: int) -> str:
    """The variant for this many rows."""
    return _forced[-1] if _forced else _find(instruction_set, key, rows)


def steps(instruction_set: str, key: str) -> Steps:
    """(largest number of rows, variant), the last without a limit."""
    return [(None, _forced[-1])] if _forced else _steps(instruction_set, key)


def table(instruction_set: str) -> Table:
    """`steps` by key."""
    return {key: steps for _, part in reversed(_tables(instruction_set)) for key, steps in part.items()}


def forced() -> str | None:
    """The variant of the innermost `force`."""
    return _forced[-1] if _forced else None


def _steps(instruction_set: str, key: str) -> Steps:
    return next(table[key] for _, table in _tables(instruction_set) if key in table)


@functools.lru_cache(maxsize=4096)
def _find(instruction_set: str, key: str, rows: int) -> str:
    return next(variant for most, variant in _steps(instruction_set, key) if most is None or rows <= most)


@contextmanager
def force(variant: str) -> Iterator[None]:
    """Use this variant inside the ``with`` block, for tests and measurements; a `ValueError` if there is none."""
    if variant not in (names := (*VARIANTS, *OTHER_VARIANTS)):
        raise ValueError(f"there is no variant {variant!r}; there are {', '.join(names)}")
    _forced.append(variant)
    generation.end()
    try:
        yield
    finally:
        _forced.pop()
        generation.end()
