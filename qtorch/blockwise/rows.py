"""Rows: what the weights of a stage meet in one batch, and how statistics are updated by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..statistics import Key, Statistic, Statistics


@dataclass
class Seen:
    """The rows that the weights of a stage have met in one batch, and the residual that the output is added to."""

    rows: dict[Key, list[Tensor]] = field(default_factory=dict)
    residual: Tensor | None = None


def update(statistics: Statistics, parts: list[Tensor], of_float: list[Tensor]) -> None:
    """Add the rows of one batch, in pairs with those of the float model where both streams have the same."""
    matches = [a.shape for a in parts] == [b.shape for b in of_float]
    for statistic in statistics.values():
        for index, rows in enumerate(parts):
            if statistic.paired and matches:
                statistic.update_pair(rows, of_float[index])  # type: ignore[attr-defined]
            else:
                statistic.update(rows)


def update_residual(statistics: Statistics, rows: Tensor, error: Tensor) -> None:
    """Add what the residual stream lacks, for the rows of one batch."""
    for statistic in statistics.values():
        if statistic.paired and len(rows) == len(error):
            statistic.update_residual(rows, error)  # type: ignore[attr-defined]


def each_of(found: Mapping[Key, Statistics]) -> list[Statistic]:
    """All statistics, those that weights share once."""
    return list({id(statistic): statistic for of_weight in found.values() for statistic in of_weight.values()}.values())
