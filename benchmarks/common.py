"""Timing that holds on a noisy machine: candidates take turns, and each reports its median."""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import qtorch
from qtorch.kernels.cpu import compiled_library
from qtorch.recipes.base import WeightRecipe

RESULTS = Path(__file__).parent / "results"

RECIPES: dict[str, WeightRecipe | None] = {
    "float": None,
    "int8": qtorch.int8_weight_only(),
    "int4 g32": qtorch.int4_weight_only(group_size=32),
    "int4 g128": qtorch.int4_weight_only(group_size=128),
    "W8A8": qtorch.int8_dynamic_activation_int8_weight(),
    "W4A8 g32": qtorch.int8_dynamic_activation_int4_weight(group_size=32),
}
"""Recipes by what tables of whole models call them."""


def interleaved_medians(
    candidates: Mapping[str, Callable[[], Any]], rounds: int = 9, seconds: float = 0.02
) -> dict[str, float]:
    """Median time of one call of each candidate, in microseconds.

    Args:
        candidates: functions of no arguments.
        rounds: turns that each candidate gets; a disturbance hits one turn, not one candidate.
        seconds: length of a turn.
    """
    calls = {}
    for name, function in candidates.items():
        for _ in range(3):
            function()
        start = time.perf_counter()
        function()
        calls[name] = max(1, int(seconds / max(time.perf_counter() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, function in candidates.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                function()
            times[name].append((time.perf_counter() - start) / calls[name] * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    wanted = ("avx2", "avx512_f", "avx512_vnni", "amx_int8")
    return {
        "date": date.today().isoformat(),
        "processor": capabilities.get("cpu_name") or platform.processor() or platform.machine(),
        "features": [name for name in wanted if capabilities.get(name)],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def instruction_set() -> str:
    """Of the compiled kernels: the name of this machine in results, unless told another."""
    library = compiled_library.library()
    return library.instruction_set if library else "not_compiled"


def save(name: str, rows: list[dict[str, Any]], about: dict[str, Any] | None = None) -> None:
    """Write ``results/<name>.json``: what the figures depend on, by default `machine()`, and the rows."""
    RESULTS.mkdir(exist_ok=True)
    data = {"machine": about or machine(), "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")


def machine_line(about: dict[str, Any]) -> str:
    """`machine()` in words, with the versions of packages that `about` has besides."""
    packages = [f"{name} {version}" for name, version in about.items() if name in ("torch", *PACKAGES)]
    parts = [f"{about['processor']} ({', '.join(about['features'])})", f"{about['threads']} threads", *packages]
    return ", ".join([*parts, about["date"]])


PACKAGES = ("onnxruntime", "openvino", "torchao")
"""Other engines that benchmarks compare with."""


def versions() -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


DOCS = Path(__file__).parent.parent / "docs" / "performance"


def write_docs(name: str, text: str, docs: Path | None = None) -> None:
    """Put `text` between the marks ``<!-- name: begin -->`` and ``<!-- name: end -->`` of a page, by default that page
    of results which has them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    for path in [docs] if docs else sorted(DOCS.glob("*.md")):
        page = path.read_text()
        if begin in page and end in page:
            before, after = page.partition(begin)[0], page.partition(end)[2]
            path.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")
            return
    raise ValueError(f"{docs or DOCS} has no {begin} and {end}")
