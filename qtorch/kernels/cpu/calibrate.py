"""Measure on this machine which way is fastest for how many rows: `calibrate_cpu`."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ...primitives.packing import pack_codes
from ...primitives.qdtype import qdtype
from . import choices
from .int8_mm import cpu_int8_mm
from .library import library
from .weight_only_mm import cpu_weight_only_mm

ROWS = (1, 2, 4, 6, 8, 12, 16, 32, 64, 256)
SIZE = 2048
COPIES = 8
"""Weights that take turns, so that they come from memory as in a model."""

ROUNDS = 5


def calibrate_cpu(path: str | Path) -> dict[str, list[tuple[int | None, str]]]:
    """Time every way of multiplying on this machine, in well under a minute, use the fastest from here on, and
    save them.

    Args:
        path: JSON file to write; the environment variable QTORCH_CPU_CHOICES makes later processes read it.

    Returns:
        For each kind of problem, (largest number of rows, way).

    Raises:
        RuntimeError: there are no compiled kernels.
    """
    compiled = library()
    if compiled is None:
        raise RuntimeError("calibrate_cpu measures the compiled kernels, and there are none")
    table: dict[str, list[tuple[int | None, str]]] = {}
    for activation, packed, grouped in itertools.product(
        ("float32", "bfloat16", "float16", "int8"), (False, True), (False, True)
    ):
        ways = [way for way in choices.WAYS if way != "amx" or compiled.instruction_set == "amx"]
        if activation == "int8":
            ways = ["dot", "tile"]
        ways.append("torch")
        layer = _layer(activation, packed, grouped)
        best = [(rows, _fastest(layer, ways, rows, activation)) for rows in ROWS]
        table[choices.key_of(activation, packed, grouped)] = _steps(best)
    Path(path).write_text(json.dumps({compiled.instruction_set: table}, indent=1) + "\n")
    choices.load(path)
    return table


def _layer(activation: str, packed: bool, grouped: bool) -> Callable[[Tensor, int], Tensor]:
    """Call the copies of a weight in turn, by number."""
    kind = qdtype("int4" if packed else "int8")
    codes = torch.randint(int(kind.quant_min), int(kind.quant_max) + 1, (COPIES, SIZE, SIZE), dtype=torch.int8)
    weights = pack_codes(codes, kind) if packed else codes
    scale = torch.full((SIZE, SIZE // 128 if grouped else 1), 0.01)
    if activation == "int8":
        quantizer = [-127.0, 127.0, 0.0, 1e-30, 1e30]
        return lambda x, i: cpu_int8_mm(
            x, None, None, quantizer, weights[i], SIZE, scale, None, packed, kind.name, x.dtype
        )
    low, high = kind.quant_min, kind.quant_max
    return lambda x, i: cpu_weight_only_mm(
        x, weights[i], SIZE, scale, None, packed, kind.name, float(low), float(high), "INT"
    )


def _fastest(layer: Callable[[Tensor, int], Tensor], ways: list[str], rows: int, activation: str) -> str:
    x = torch.randn(rows, SIZE, dtype=torch.float32 if activation == "int8" else getattr(torch, activation))
    if rows > 16:
        # Dot products read the weight once every eight rows.
        ways = [way for way in ways if way != "dot"]
    times: dict[str, list[float]] = {way: [] for way in ways}
    turns = itertools.cycle(range(COPIES))
    for _ in range(ROUNDS):
        for way in ways:
            with choices.force(way):
                start = time.perf_counter()
                for _ in range(2 if rows <= 16 else 1):
                    layer(x, next(turns))
                times[way].append(time.perf_counter() - start)
    return min(ways, key=lambda way: min(times[way]))


def _steps(best: list[tuple[int, str]]) -> list[tuple[int | None, str]]:
    """Neighbours of the same way joined; a single one that differs from both its neighbours is noise."""
    ways = [way for _, way in best]
    for i in range(1, len(ways) - 1):
        if ways[i - 1] == ways[i + 1]:
            ways[i] = ways[i - 1]
    steps: list[tuple[int | None, str]] = []
    for (rows, _), way in zip(best, ways):
        if steps and steps[-1][1] == way:
            steps.pop()
        steps.append((rows, way))
    steps[-1] = (None, steps[-1][1])
    return steps
