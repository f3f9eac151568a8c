"""Swaps: exchange the recipes of two weights where that brings the outputs of the quantized model nearer.

Scores add up what each weight does alone. Here the whole model is quantized and run on held-out batches; a swap is kept
if the divergence from the float model falls. Swaps that the scores say cost least are tried first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..data import Data, eval_mode
from ..engine.in_order import installed
from .items import Item
from .scores import Rows


class Swap(NamedTuple):
    """New options of some items, by index, and the change of the sum of scores that they say."""

    options: dict[int, int]
    change: float


class Improved(NamedTuple):
    """The options after the swaps, the divergence before and after, and how many swaps were tried and kept."""

    options: tuple[int, ...]
    before: float
    after: float
    tried: int
    kept: int


def swaps(
    options: Sequence[int], costs: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], limit: int
) -> list[Swap]:
    """All changes of one weight or two that stay within the limit, those that the scores prefer first."""
    total = sum(cost[option] for cost, option in zip(costs, options))
    moves = [
        (item, other, costs[item][other] - costs[item][option], scores[item][other] - scores[item][option])
        for item, option in enumerate(options)
        for other in range(len(costs[item]))
        if other != option
    ]
    found = [Swap({item: other}, change) for item, other, cost, change in moves if total + cost <= limit]
    for (a, to_a, cost_a, change_a), (b, to_b, cost_b, change_b) in itertools.combinations(moves, 2):
        # One weight gets more, the other less.
        if a != b and cost_a * cost_b < 0 and total + cost_a + cost_b <= limit:
            found.append(Swap({a: to_a, b: to_b}, change_a + change_b))
    return sorted(found, key=lambda swap: swap.change)


class Divergence:
    """The divergence of a quantized model from the float one, on batches whose float outputs are kept."""

    def __init__(self, model: nn.Module, items: Sequence[Item], data: Data, logits: bool = False) -> None:
        self.model, self.items, self.data, self.logits = model, items, data, logits
        self.batches = data.checked()
        with eval_mode(model), torch.no_grad():
            self.of_float = [self._rows(index) for index in range(len(self.batches))]

    def _rows(self, index: int) -> Rows:
        batch = self.batches[index]
        return Rows.of(self.data.call(self.model, batch), self.data.mask_of(batch), self.logits)

    @torch.no_grad()
    def of(self, parameters: Sequence[nn.Parameter]) -> float:
        """The mean over all rows, with these weights in place of the items."""
        total, count = 0.0, 0
        places = [(item.target, parameter) for item, parameter in zip(self.items, parameters, strict=True)]
        with eval_mode(self.model), installed(places):
            for index, reference in enumerate(self.of_float):
                divergence = reference.divergence(self._rows(index))
                total += float(divergence.double().sum())
                count += len(divergence)
        return total / max(1, count)


@torch.no_grad()
def quantized(item: Item, option: int) -> nn.Parameter:
    """The weight of an item under one of its candidates."""
    candidate = item.candidates[option]
    if candidate is None:
        return item.parameter
    return nn.Parameter(candidate.make(item.target, item.parameter.detach()), False)


def improve(
    divergence: Divergence,
    options: Sequence[int],
    costs: Sequence[Sequence[int]],
    scores: Sequence[Sequence[float]],
    limit: int,
    tries: int,
) -> Improved:
    """Try up to `tries` swaps, and keep those by which the divergence falls."""
    items = divergence.items
    chosen = list(options)
    parameters = [quantized(item, option) for item, option in zip(items, chosen)]
    before = least = divergence.of(parameters)
    seen = {tuple(chosen)}
    tried = kept = 0
    queue = iter(swaps(chosen, costs, scores, limit))
    while tried < tries and (swap := next(queue, None)) is not None:
        result = tuple(swap.options.get(index, option) for index, option in enumerate(chosen))
        if result in seen:
            continue
        seen.add(result)
        tried += 1
        new = list(parameters)
        for index, option in swap.options.items():
            new[index] = quantized(items[index], option)
        if (found := divergence.of(new)) < least:
            least, parameters, chosen, kept = found, new, list(result), kept + 1
            queue = iter(swaps(chosen, costs, scores, limit))
    return Improved(tuple(chosen), before, least, tried, kept)
