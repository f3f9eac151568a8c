"""Calls of one row while other work wants the same cores: median, 90th percentile and mean, in milliseconds.

Each situation is a process of its own, held to two cores, with two threads a call; the candidates take turns. A busy
process is held to the same cores and never sleeps.

    python -m benchmarks.bench_under_load [--size 4096] [--seconds 6] [--save] [--write-docs]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.common import machine, machine_line, save, write_docs
from qtorch import int4_weight_only, int8_dynamic_activation_int8_weight, int8_weight_only, quantize_

NAME = "under_load"
THREADS = 2
CALLS = 20  # of a candidate in its turn


@dataclass(frozen=True)
class Situation:
    """What happens on the cores besides one call of two threads."""

    busy: int = 0
    """Processes that compute all the time."""
    cores: int = 2
    callers: int = 1
    """Threads that call at the same time."""


SITUATIONS = {
    "nothing else": Situation(),
    "1 busy process": Situation(busy=1),
    "2 busy processes": Situation(busy=2),
    "held to one core": Situation(cores=1),
    "8 callers at once": Situation(callers=8),
}

RECIPES = {
    "int8 weight-only": int8_weight_only(),
    "int4 g128": int4_weight_only(group_size=128),
    "W8A8": int8_dynamic_activation_int8_weight(),
}


@contextmanager
def busy(count: int, cores: list[int]) -> Iterator[None]:
    """This many processes that compute on these cores."""
    loop = f"import os; os.sched_setaffinity(0, {cores})\nwhile True: sum(range(10000))"
    processes = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        time.sleep(0.3 if count else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def candidates(size: int) -> dict[str, Callable[[], Any]]:
    """A call of one row each. What fits into the caches stays there for the calls of a turn."""
    layers = {"float": nn.Linear(size, size)}
    for name, recipe in RECIPES.items():
        layers[name] = nn.Linear(size, size)
        quantize_(layers[name], recipe)
    x = torch.randn(1, size)
    return {name: (lambda layer=layer: layer(x)) for name, layer in layers.items()}


@torch.no_grad()
def _timed(call: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1e3)
    return times


def measure(situation: Situation, size: int, seconds: float) -> dict[str, list[float]]:
    """Median, 90th percentile and mean of each candidate's calls, in this process."""
    torch.set_num_threads(THREADS)
    calls = candidates(size)
    for call in calls.values():
        _timed(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    with busy(situation.busy, sorted(os.sched_getaffinity(0))), ThreadPoolExecutor(situation.callers) as pool:
        stop = time.perf_counter() + seconds * len(calls)
        while time.perf_counter() < stop:
            for name, call in calls.items():
                start = threading.Barrier(situation.callers)

                def caller(call: Callable[[], Any] = call, start: threading.Barrier = start) -> list[float]:
                    torch.set_num_threads(THREADS)
                    start.wait()
                    return _timed(call)

                for future in [pool.submit(caller) for _ in range(situation.callers)]:
                    times[name] += future.result()
    return {
        name: [statistics.median(each), statistics.quantiles(each, n=10)[8], statistics.mean(each)]
        for name, each in times.items()
    }


def in_a_process(name: str, size: int, seconds: float) -> dict[str, list[float]]:
    """`measure` in a process that is held to its cores before it starts threads."""
    cores = sorted(os.sched_getaffinity(0))[: SITUATIONS[name].cores]
    call = [sys.executable, "-m", "benchmarks.bench_under_load", "--measure", name]
    found = subprocess.run(
        [*call, "--size", str(size), "--seconds", str(seconds)],
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(found.stdout)  # type: ignore[no-any-return]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row for each situation, median / 90th percentile / mean."""
    names = ["float", *RECIPES]
    lines = [f"| | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for row in rows:
        cells = [f"{row[name][0]:.2f} / {row[name][1]:.2f} / {row[name][2]:.2f}" for name in names]
        lines.append(f"| {row['situation']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=6, help="for each candidate")
    parser.add_argument("--save", action="store_true", help=f"write results/{NAME}.json")
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/performance")
    parser.add_argument("--measure", choices=SITUATIONS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(SITUATIONS[args.measure], args.size, args.seconds)))
        return
    rows = [{"situation": name, **in_a_process(name, args.size, args.seconds)} for name in SITUATIONS]
    torch.set_num_threads(THREADS)
    about = machine()
    text = f"{machine_line(about)}.\n\n{table(rows)}"
    print(text)
    if args.save:
        save(NAME, rows, about)
    if args.write_docs:
        write_docs(NAME, text)


if __name__ == "__main__":
    main()
