"""The multiple-choice knapsack: one option of each item, so that the values are least and the costs within a limit.

Dynamic programming over the items keeps the totals (cost, value) that no other total beats in both, each with its true
cost, so a result never exceeds the limit. Where there are more than `STATES` of them, costs are divided into that many
equal intervals and the best of each interval is kept; otherwise the result is exact. What remains in the end is the
best value for every limit: the curve of size and quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STATES = 1 << 15
"""Number of totals that are kept after each item."""


class Solution(NamedTuple):
    """The index of the option of each item, and their total."""

    options: tuple[int, ...]
    cost: int
    value: float


class Frontier:
    """The totals that no other total beats, by increasing cost and decreasing value.

    Args:
        costs: of the options of each item, integers.
        values: of the options of each item, the less the better.
        limit: totals above it are left out; None for all.
        states: number of totals that are kept after each item.
    """

    def __init__(
        self,
        costs: Sequence[Sequence[int]],
        values: Sequence[Sequence[float]],
        limit: int | None = None,
        states: int = STATES,
    ) -> None:
        self.cost, self.value = np.zeros(1, np.int64), np.zeros(1, np.float64)
        self.steps: list[tuple[np.ndarray, np.ndarray]] = []
        least = [min(options) for options in costs]
        rest = sum(least)
        for index, (of_options, value_of) in enumerate(zip(costs, values, strict=True)):
            rest -= least[index]
            cost = (self.cost[:, None] + np.asarray(of_options, np.int64)[None]).reshape(-1)
            value = (self.value[:, None] + np.asarray(value_of, np.float64)[None]).reshape(-1)
            kept = np.arange(len(cost))
            if limit is not None:
                kept = kept[cost <= limit - rest]
            kept = kept[np.lexsort((value[kept], cost[kept]))]
            kept = _not_beaten(kept, value)
            if len(kept) > states:
                kept = _best_of_intervals(kept, cost, states)
            self.cost, self.value = cost[kept], value[kept]
            parents, chosen = np.divmod(kept, len(of_options))
            self.steps.append((parents.astype(np.int32), chosen.astype(np.int16)))

    def __len__(self) -> int:
        return len(self.cost)

    def solution(self, index: int = -1) -> Solution:
        """Total `index`; the last one is the best.

        Raises:
            ValueError: no total is within the limit.
        """
        if not len(self):
            raise ValueError("knapsack: no choice of options is within the limit")
        cost, value = int(self.cost[index]), float(self.value[index])
        options = []
        at = index % len(self)
        for parents, chosen in reversed(self.steps):
            options.append(int(chosen[at]))
            at = int(parents[at])
        return Solution(tuple(reversed(options)), cost, value)


def _not_beaten(order: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Of totals in order of their cost, those with a lower value than all before them."""
    if not len(order):
        return order
    values = value[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(values)[:-1]])
    # The first stays even if its value is infinite.
    better = values < before
    better[0] = True
    return order[better]


def _best_of_intervals(order: np.ndarray, cost: np.ndarray, states: int) -> np.ndarray:
    """The last total, whose value is the least, of each of `states` equal intervals of the costs."""
    costs = cost[order]
    low, high = int(costs[0]), int(costs[-1])
    interval = (costs - low) // max(1, -(-(high - low + 1) // states))
    last = np.append(interval[1:] != interval[:-1], True)
    return order[last]
