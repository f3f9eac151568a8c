"""`calibrate_cpu`: measure the choice between ways of multiplying on this machine, and use it from then on."""

from __future__ import annotations

from pathlib import Path

from . import cache, processor, ways, ways_file
from .compiled_library import library
from .measure_ways import measure_ways
from .ways_file import Table


def calibrate_cpu(path: str | Path | None = None) -> Table:
    """Measure which compiled kernel is fastest for how many rows on this machine, and use the result from now on.

    It takes about a minute, with as many threads as torch has, which should be those of later use; nothing else
    should run meanwhile. Results of layers may change in their last bits, because other kernels may run.

    Args:
        path: JSON file to write; tables of other instruction sets and processors that it has are kept. The environment
            variable QTORCH_CPU_CHOICES makes later processes read it. By default the file of this user and this kind
            of processor in the cache, which later processes read on their own: ``~/.cache/qtorch/cpu-*/ways_*.json``.

    Returns:
        For each kind of weight, dtype and size, a list of (largest number of rows, way).

    Raises:
        RuntimeError: no compiled kernels are in use; or the cache cannot be written to, and there is no `path`.
        ValueError: `path` is a file of something else.
    """
    compiled = library()
    if compiled is None:
        raise RuntimeError("calibrate_cpu measures the compiled kernels, which are missing")
    found = Path(path) if path is not None else ways_file.path_of_user()
    if path is None and (reason := cache.prepare(found.parent)):
        raise RuntimeError(f"calibrate_cpu: {reason}; give it a path, and name that in QTORCH_CPU_CHOICES")
    tables = ways_file.read(found) if path is not None and found.exists() else ways_file.of_user()
    table = measure_ways(compiled)
    tables.setdefault(compiled.instruction_set, {})[processor.kind()] = table
    ways_file.write(found, tables)
    ways.load(found)
    return table
