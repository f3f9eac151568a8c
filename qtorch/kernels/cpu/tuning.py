"""`tune_cpu`: measure the choice between variants on this machine, and use it from then on."""

import functools
import itertools
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...primitives.layouts.packed import pack_codes
from ...primitives.qdtype import qdtype
from . import cache, compiled_library, variants
from .int8_linear import Int8Linear, multiply_in_torch, numerics_of
from .variants import Steps, Table
from .weight_only import CompiledLinear, Dequantized, WeightOnlyLinear, multiply_dequantized

ROWS = {"small": (1, 2, 4, 8, 16, 32, 64, 256, 1024), "large": (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512)}
"""Numbers of rows to measure, by size of the weight."""

COPIES = {"small": 8, "large": 64}
"""Weights in int8 used in turn, and as many bytes of others: large ones are read from memory, as in a model; some
processors keep 64 MB in a cache."""

SIZES = {"small": 1024, "large": 2048}  # rows and columns of the weight; the largest of the small ones costs most
GROUP, SHORT_GROUP = 128, 32  # columns of a group; those of a short one, see `variants.key_of`
ROUNDS, SECONDS = 15, 0.03  # at least so many, and for so long: the calls of few rows are short
HOPELESS = 2.0  # a variant that after three rounds took so many times the least time is not measured again


def measure_variants(compiled: compiled_library.Library) -> Table:
    """The fastest variant for each kind of weight and number of rows, on this machine with torch's threads."""
    there = ["dot", "tile", "fixed", *(["amx"] if compiled.instruction_set == "amx" else [])]
    table: Table = {}
    for size, packed, grouped in itertools.product(SIZES, (False, True), (False, True)):
        weights = _Weights(size, packed, GROUP if grouped else SIZES[size])
        inputs = [torch.randn(rows, SIZES[size], dtype=torch.float32, device="cpu") for rows in ROWS[size]]
        key = variants.key_of("int8", packed, grouped, SIZES[size] ** 2)
        table[key] = _steps({len(x): _times(weights.calls(x, ["dot", "tile", "torch"])) for x in inputs})
        if packed and grouped:
            short = _Weights(size, packed, SHORT_GROUP)
            key = variants.key_of("int8", packed, grouped, SIZES[size] ** 2, short_groups=True)
            table[key] = _steps({len(x): _times(short.calls(x, ["dot", "tile", "channels"])) for x in inputs})
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            floats = weights.floats(dtype)
            times = {len(x): _times(weights.calls(x.to(dtype), [*there, "float"], floats)) for x in inputs}
            key = variants.key_of(dtype, packed, grouped, SIZES[size] ** 2)
            table[key], table[f"{key} copied"] = _steps(times, {"copy"}), _steps(times, {"float"})
    return table


class _Weights:
    """Random weights of one kind, `group` columns to a scale."""

    def __init__(self, name: str, packed: bool, group: int) -> None:
        kind, size = qdtype("int4" if packed else "int8"), SIZES[name]
        low, high = int(kind.quant_min), int(kind.quant_max)
        self.bytes = COPIES[name] * size * size
        shape = COPIES[name] * (2 if packed else 1), size, size
        codes = torch.randint(low, high + 1, shape, dtype=torch.int8, device="cpu")
        self.codes = list(pack_codes(codes, kind) if packed else codes)
        self.scale = torch.full((size, size // group), 0.01, dtype=torch.float32, device="cpu")
        self.about = (size, size, kind.name, packed, "INT", 0.0)

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Weights in floating point, (count, size, size)."""
        size = self.about[0]
        count = max(1, self.bytes // (size**2 * dtype.itemsize))
        return torch.randn(count, size, size, dtype=torch.float32, device="cpu").to(dtype)

    def calls(self, x: Tensor, names: list[str], floats: Tensor | None = None) -> dict[str, Callable[[], object]]:
        """Multiply `x` with one of the weights after the other, by variant: as int8 codes; if there are `floats`,
        weight-only, and also with these, "copy". Only what `F.linear` repeats is run: to force a variant through it
        would make each weight's struct anew, which takes longer than a small layer."""
        n, k, kind, packed = self.about[:4]
        quantizer = [-127.0, 127.0, 0.0, 0.0, 1e-30, 1e30]
        made: type[CompiledLinear] = Int8Linear if floats is None else WeightOnlyLinear
        of_input = (x.dtype, x.dtype, *(("int8", numerics_of(quantizer)) if floats is None else (x.dtype, ())))
        layers = [made(codes, self.scale, None, *self.about, *of_input) for codes in self.codes]
        turns = itertools.cycle(zip(layers, self.codes, strict=True))

        def multiply(variant: str) -> object:
            layer, codes = next(turns)
            if variant == "torch":
                return multiply_in_torch(x, None, None, quantizer, codes, self.scale, None, packed, kind, x.dtype)
            if variant == "float":
                assert layer.compiled is not None
                return multiply_dequantized(x, Dequantized(layer.compiled, layer.fields, n, k, x.dtype), None)
            return layer.run(x, k, len(x), (len(x), n), None, variant, layer.numerics)

        # Dot products read the whole weight for every eight rows.
        names = [variant for variant in names if variant != "dot" or len(x) <= 16]
        found: dict[str, Callable[[], object]] = {variant: functools.partial(multiply, variant) for variant in names}
        if floats is not None:
            copies = itertools.cycle(floats)
            found["copy"] = lambda: torch.nn.functional.linear(x, next(copies))
        return found


def _times(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The least time of each call, over rounds in which they take turns."""
    times = dict.fromkeys(calls, float("inf"))
    stop = time.perf_counter() + SECONDS
    for turn in itertools.count():
        if turn >= ROUNDS and time.perf_counter() > stop:
            break
        least = min(times.values())
        for variant, call in calls.items():
            if turn > 2 and times[variant] > HOPELESS * least:
                continue
            start = time.perf_counter()
            call()
            times[variant] = min(times[variant], time.perf_counter() - start)
    return times


def _steps(times: Mapping[int, Mapping[str, float]], without: Collection[str] = ()) -> Steps:
    """The fastest variant for each number of rows, joined where neighbours agree. A single one that differs from both
    neighbours is taken for noise. The time of "copy" counts as "float"."""
    best = [min(of.keys() - set(without), key=of.__getitem__).replace("copy", "float") for of in times.values()]
    for i in range(1, len(best) - 1):
        if best[i - 1] == best[i + 1]:
            best[i] = best[i - 1]
    steps: Steps = []
    for rows, variant in zip(times, best):
        if steps and steps[-1][1] == variant:
            steps.pop()
        steps.append((rows, variant))
    steps[-1] = (None, steps[-1][1])
    return steps


def tune_cpu(path: str | Path | None = None) -> Table:
    """Measure which compiled kernel is fastest for how many rows on this machine, and use the result from now on.

    It takes about a minute, with as many threads as torch has, which should be those of later use; nothing else
    should run meanwhile. Results of layers may change in their last bits, because other kernels may run.

    Args:
        path: JSON file to write; tables of other instruction sets and processors that it has are kept. The environment
            variable QTORCH_CPU_CHOICES makes later processes read it. By default the file of this user and this kind
            of processor in the cache, which later processes read on their own:
            ``~/.cache/qtorch/cpu-*/variants_*.json``.

    Returns:
        For each kind of weight, dtype and size, a list of (largest number of rows, variant).

    Raises:
        RuntimeError: no compiled kernels are in use; or the cache cannot be written to, and there is no `path`.
        ValueError: `path` is a file of something else.
    """
    compiled = compiled_library.library()
    if compiled is None:
        raise RuntimeError("tune_cpu measures the compiled kernels, which are missing")
    found = Path(path) if path is not None else variants.path_of_user()
    if path is None and (reason := cache.prepare(found.parent)):
        raise RuntimeError(f"tune_cpu: {reason}; give it a path, and name that in QTORCH_CPU_CHOICES")
    tables = variants.read(found) if path is not None and found.exists() else variants.of_user()
    table = measure_variants(compiled)
    tables.setdefault(compiled.instruction_set, {})[variants.processor_kind()] = table
    variants.write(found, tables)
    variants.load(found)
    return table
