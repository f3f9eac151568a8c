"""Launch configurations of the GPU kernels: tables shipped per GPU, the nearest match, and tuning when asked.

A table is a JSON file with named fields (`configs/`). For (op, dtype, M, N, K) the nearest entry is used, by the
distance |log2 M/M'| + |log2 N/N'| + |log2 K/K'|, with M rounded up to a power of two. A GPU without a table uses that
of the same compute capability with the nearest number of multiprocessors, else `default.json`. A look-up takes a
microsecond. Nothing is timed unless asked for, by `autotune` or ``QTORCH_AUTOTUNE=1``. ``QTORCH_CONFIGS=file`` names a
table of one's own, which precedes the shipped ones; tuning writes to it.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ...primitives.files import read_json
from ...primitives.jsonable import construct
from ..custom_ops import note

SHIPPED = Path(__file__).parent / "configs"

Shape = tuple[int, int, int]
LaunchKey = tuple[str, str, Shape]
"""(op, dtype, (M, N, K)), M a power of two."""


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel of tiles is launched.

    Attributes:
        block_m, block_n, block_k: the tile of a program; kernels round `block_k` down to what groups allow.
        group_m: rows of tiles that share a band (see `tile_of`).
        split_k: programs that share the contracted axis of a tile.
        num_warps, num_stages: Triton's.
        tma: fetch tiles by the copy engine, on GPUs that have one and for operands that allow it.
        path: which variant of a kernel, where it has several.
    """

    block_m: int = 16
    block_n: int = 64
    block_k: int = 64
    group_m: int = 8
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3
    tma: bool = False
    path: str = ""

    @property
    def options(self) -> dict[str, int]:
        """What Triton itself takes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class Table:
    """The content of a file for one GPU.

    Attributes:
        gpu: its name as `torch.cuda.get_device_name` has it, ``""`` for any.
        capability, multiprocessors: of that GPU.
        measured: date of the measurement, None for values that are not measured.
        entries: the configuration of each problem.
    """

    def __init__(self, content: dict[str, Any], name: str) -> None:
        self.name = name
        self.gpu: str = content["gpu"]
        self.capability = tuple(content["capability"])
        self.multiprocessors: int = content["multiprocessors"]
        self.measured: str | None = content["measured"]
        self.entries: dict[LaunchKey, LaunchConfig] = {}
        for entry in content["configs"]:
            entry = dict(entry)
            op, dtype, *shape = (entry.pop(key) for key in ("op", "dtype", "m", "n", "k"))
            config = construct(LaunchConfig, entry)
            numbers = [*shape, *(value for value in asdict(config).values() if type(value) is int)]
            are_numbers = all(type(number) is int and 0 < number <= 1 << 31 for number in numbers)
            if not isinstance(op, str) or not isinstance(dtype, str) or not are_numbers:
                raise ValueError(f"the entry {op!r:.40}, {dtype!r:.40}, {shape!r:.80}: {config!r:.400}")
            self.entries[op, dtype, (shape[0], shape[1], shape[2])] = config

    @staticmethod
    def read(path: Path) -> Table:
        """The table of a file, which may be the user's; `ValueError` if it has anything but launch configurations."""
        try:
            return Table(read_json(path, 1 << 24), path.stem)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: it is not a table of launch configurations: {error}") from error

    def write(self, path: Path) -> None:
        lines = []
        for (op, dtype, (m, n, k)), config in sorted(self.entries.items(), key=lambda item: item[0]):
            changed = {f.name: value for f in fields(config) if (value := getattr(config, f.name)) != f.default}
            lines.append("  " + json.dumps({"op": op, "dtype": dtype, "m": m, "n": n, "k": k, **changed}))
        head = {"gpu": self.gpu, "capability": list(self.capability), "multiprocessors": self.multiprocessors}
        text = json.dumps({**head, "measured": self.measured})[:-1]
        path.write_text(text + ', "configs": [\n' + ",\n".join(lines) + "\n]}\n")

    def nearest(self, op: str, dtype: str, shape: Shape) -> LaunchConfig | None:
        """The entry of this op at the least distance, where another dtype counts as a size four times as large; None if
        the op has none."""
        same = [(p, config) for p, config in self.entries.items() if p[0] == op]
        far = lambda a: sum(abs(math.log2(max(x, 1) / max(y, 1))) for x, y in zip(a, shape, strict=True))  # noqa: E731
        return min(same, key=lambda item: far(item[0][2]) + 2 * (item[0][1] != dtype))[1] if same else None


@functools.cache
def tables() -> list[Table]:
    """The tables to ask for the current device, in order."""
    found = [Table.read(path) for path in sorted(SHIPPED.glob("*.json"))]
    default = [t for t in found if t.name == "default"]
    own = _own_file()
    mine = [Table.read(own)] if own is not None and own.exists() else []
    if not torch.cuda.is_available():
        return mine + default
    properties = torch.cuda.get_device_properties()
    capability = (properties.major, properties.minor)
    exact = [t for t in found if t.gpu == properties.name]
    alike = [t for t in found if t.capability == capability and t not in exact]
    alike.sort(key=lambda t: abs(t.multiprocessors - properties.multi_processor_count))
    return mine + (exact or alike[:1]) + default


@functools.cache
def _nearest(op: str, dtype: str, shape: Shape) -> LaunchConfig:
    for table in tables():
        if (config := table.nearest(op, dtype, shape)) is not None:
            return config
    return LaunchConfig()


def _own_file() -> Path | None:
    name = os.environ.get("QTORCH_CONFIGS")
    return Path(name) if name else None


# While tuning, the configurations found so far; else None.
_tuned: dict[LaunchKey, LaunchConfig] | None = {} if os.environ.get("QTORCH_AUTOTUNE") == "1" else None
_forced: list[LaunchConfig] = []
_fitting: dict[tuple[LaunchConfig, str, str], LaunchConfig] = {}
"""By (config, op, dtype): with fewer stages, what fits where the table asks for more shared memory than there is."""


def _rounded(shape: Shape) -> Shape:
    m, n, k = shape
    return 1 << max(0, m - 1).bit_length(), n, k


def find(op: str, dtype: str, shape: Shape) -> LaunchConfig:
    """The configuration for a problem: the forced one, the tuned one, or the nearest of the tables."""
    if _forced:
        return _forced[-1]
    rounded = _rounded(shape)
    if _tuned is not None and (config := _tuned.get((op, dtype, rounded))) is not None:
        return config
    return _nearest(op, dtype, rounded)


def launch(
    op: str, dtype: str, shape: Shape, run: Callable[[LaunchConfig], None], candidates: Iterable[LaunchConfig],
    device: torch.device,
) -> None:  # fmt: skip
    """Run a kernel with the configuration of its problem; while tuning, time the candidates at its first call.

    Args:
        op, dtype, shape: of the problem, as in the tables.
        run: launches, without side effects beyond its result.
        candidates: what tuning tries.
        device: of the tensors.
    """
    from triton.runtime.errors import OutOfResources

    if _tuned is not None and not _forced and device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        problem = (op, dtype, _rounded(shape))
        if problem not in _tuned:
            _tuned[problem] = _fastest(run, [find(op, dtype, shape), *candidates])
            if (own := _own_file()) is not None:
                _save_tuned(own)
    config = find(op, dtype, shape)
    note(f"triton.{op}" + (f".{config.path}" if config.path else ""))
    launched = config, op, dtype
    config = _fitting.get(launched, config)
    while True:
        try:
            return run(config)
        except OutOfResources:  # tables are measured for some widths of codes; others take more shared memory
            if config.num_stages == 1:
                raise
            config = _fitting[launched] = replace(config, num_stages=config.num_stages - 1)


def _fastest(run: Callable[[LaunchConfig], None], candidates: Iterable[LaunchConfig]) -> LaunchConfig:
    """The candidate of the least median time, without those that the GPU cannot run (registers, shared memory)."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    times: dict[LaunchConfig, float] = {}
    for config in dict.fromkeys(candidates):
        try:
            run(config)
            times[config] = do_bench(lambda config=config: run(config), warmup=5, rep=25, return_mode="median")
        except (OutOfResources, RuntimeError):
            continue
    if not times:
        raise RuntimeError("no launch configuration runs on this GPU")
    return min(times, key=times.__getitem__)


@contextmanager
def autotune(save_to: str | os.PathLike[str] | None = None) -> Iterator[dict[LaunchKey, LaunchConfig]]:
    """Within the ``with`` block, time the candidates of each GPU kernel at the first call with a new shape, and use the
    fastest from then on: seconds for each shape. Gives the configurations found.

    Args:
        save_to: write them to this table when the block ends, beside those it has; name it in ``QTORCH_CONFIGS`` to use
            them in later processes.
    """
    global _tuned
    before = _tuned
    _tuned = {} if before is None else before
    try:
        yield _tuned
    finally:
        if save_to is not None:
            _save_tuned(Path(save_to))
        found = _tuned
        _tuned = before
        if found:
            own = tables()[0] if tables() and tables()[0].name == "tuned" else _new_table()
            own.entries.update(found)
            if own not in tables():
                tables().insert(0, own)
            _nearest.cache_clear()


def _save_tuned(path: Path) -> None:
    """Write what has been tuned to a table, beside the entries it has."""
    table = Table.read(path) if path.exists() else _new_table()
    table.entries.update(_tuned or {})
    table.write(path)


def _new_table() -> Table:
    from datetime import date

    content: dict[str, Any] = {"gpu": "", "capability": [], "multiprocessors": 0, "measured": None, "configs": []}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties()
        content |= {
            "gpu": properties.name,
            "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
            "measured": date.today().isoformat(),
        }
    return Table(content, "tuned")


@contextmanager
def forced(config: LaunchConfig | None = None, **changes: Any) -> Iterator[None]:
    """Launch with this configuration, whatever the tables say, in the ``with`` block: for tests and measurements."""
    _forced.append(LaunchConfig(**{**(asdict(config) if config else {}), **changes}))
    try:
        yield
    finally:
        _forced.pop()
