"""How long the product with a weight takes under each candidate, measured on this machine.

The candidates of a shape take turns, so that a disturbance hits all of them, and each reports its median. Weights of
one shape are measured once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .items import Candidate, Item

SECONDS = 0.02
"""Length of a turn of a candidate."""

TURNS = 7


def interleaved_medians(
    candidates: Sequence[Callable[[], Any]], turns: int = TURNS, seconds: float = SECONDS
) -> list[float]:
    """Median time of one call of each function, in nanoseconds."""
    for function in candidates:
        for _ in range(3):
            function()
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(turns):
        for index, function in enumerate(candidates):
            calls, start = 0, time.perf_counter_ns()
            while not calls or time.perf_counter_ns() - start < seconds * 1e9:
                function()
                calls += 1
            times[index].append((time.perf_counter_ns() - start) / calls)
    return [statistics.median(of_one) for of_one in times]


@torch.no_grad()
def measure(items: Sequence[Item], rows: int) -> list[list[int]]:
    """Nanoseconds of a product of (rows, K) with each weight under each of its candidates.

    Raises:
        ValueError: an item is not the weight of a linear layer.
    """
    if others := [item.name for item in items if not item.is_product]:
        raise ValueError(
            f"allocate: a budget of time is for linear layers, got {', '.join(others[:4])}; leave them out of the "
            "candidates, or give a budget in bits or bytes"
        )
    known: dict[Any, list[int]] = {}
    return [product_times(item, rows, known) for item in items]


def product_times(item: Item, rows: int, known: dict[Any, list[int]] | None = None) -> list[int]:
    """Nanoseconds of a product of (rows, K) with a weight under each of its candidates.

    Args:
        known: what has been measured, by shape; what is missing is added.
    """
    known = {} if known is None else known
    weight = item.matrix
    key = (tuple(weight.shape), weight.dtype, weight.device, item.candidates, rows)
    if key not in known:
        x = torch.randn(rows, weight.shape[-1], dtype=weight.dtype, device=weight.device)
        known[key] = [round(ns) for ns in interleaved_medians([_product(x, weight, each) for each in item.candidates])]
    return known[key]


def _product(x: Tensor, weight: Tensor, candidate: Candidate) -> Callable[[], None]:
    made = weight if candidate is None else candidate.apply(weight)
    parameter = nn.Parameter(made, False)
    on_gpu = x.device.type == "cuda"

    def run() -> None:
        functional.linear(x, parameter)
        if on_gpu:
            torch.cuda.synchronize(x.device)

    return run
