"""Timing on a GPU: medians of CUDA-graph replays, candidates in turns, weights that rotate past the L2 cache.

Without a GPU the same code runs every candidate once, small, in Triton's interpreter, and times nothing.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # Before anything imports triton.
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
"""The float that everything is compared with; the interpreter has no arithmetic in bf16."""

FOOTPRINT = 256 << 20
"""Bytes that copies of a weight take together: several times the L2 of an H200."""

CALLS = 20
"""Calls in a graph."""

ROUNDS = 15
"""Replays that each candidate gets, in turns."""


class Row(NamedTuple):
    """One measurement: `us` a call; `ratio`, the float candidate's time divided by it; None where nothing is timed."""

    bench: str
    m: int
    n: int
    k: int
    what: str
    us: float | None
    ratio: float | None


Candidate = Callable[[int], Any]
"""Does its work once; the argument numbers the call, by which it takes the next copy of its weight."""


def copies(weight: Callable[[], Any], nbytes: int) -> list[Any]:
    """As many weights as fill the footprint, 16 at most."""
    count = min(16, max(1, -(-FOOTPRINT // max(nbytes, 1)))) if ON_GPU else 1
    return [weight() for _ in range(count)]


def in_turn(function: Callable[[Any], Any], weights: Sequence[Any]) -> Candidate:
    """Call `function` with the weights in turn."""
    return lambda call: function(weights[call % len(weights)])


def measure(
    bench: str, shape: tuple[int, int, int], candidates: dict[str, Candidate], baseline: str, calls: int = CALLS
) -> list[Row]:
    """Time the candidates; one that raises is reported and left out."""
    times = _times(candidates, calls)
    if baseline not in times:
        return []
    base = times[baseline]
    return [
        Row(bench, *shape, name, us, None if us is None or base is None else base / us) for name, us in times.items()
    ]


def _times(candidates: dict[str, Candidate], calls: int) -> dict[str, float | None]:
    if not ON_GPU:
        for candidate in candidates.values():
            candidate(0)
        return dict.fromkeys(candidates)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, candidate in candidates.items():
        try:
            graphs[name] = _capture(candidate, calls)
        except Exception as error:  # a candidate of another library, or one that this GPU lacks
            print(f"  {name}: left out, {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def _capture(candidate: Candidate, calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in range(3):
            candidate(call)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            candidate(call)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def normal(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Gaussian numbers on the device: never zeros, which a GPU multiplies faster."""
    return torch.randn(shape, device=DEVICE, dtype=torch.float32 if not ON_GPU else None).to(dtype or DTYPE)


def sizes(full: Sequence[Any], small: Sequence[Any]) -> Sequence[Any]:
    """The sizes to measure, or those for the interpreter."""
    return full if ON_GPU else small


def report(rows: list[Row]) -> None:
    """Print one line a shape, ratios to the first candidate."""
    shapes = dict.fromkeys((row.bench, row.m, row.n, row.k) for row in rows)
    for bench, m, n, k in shapes:
        mine = [row for row in rows if (row.bench, row.m, row.n, row.k) == (bench, m, n, k)]
        print(f"{bench} {m} x {n} x {k}: " + ", ".join(map(_words, mine)), flush=True)


def _words(row: Row) -> str:
    if row.us is None or row.ratio is None:
        return f"{row.what} ran"
    return f"{row.what} {row.us:.1f} us ({row.ratio:.2f})"


def main(run: Callable[[], list[Row]], description: str | None) -> None:
    """The command line of a benchmark that has no options: measure and report."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    report(run())


@functools.cache
def versions() -> dict[str, str]:
    """What a figure depends on."""
    from datetime import date

    import triton

    gpu = torch.cuda.get_device_name() if ON_GPU else "none"
    return {"date": date.today().isoformat(), "gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
