"""Inputs of the weights that a fold divides: the extent of each channel over all tokens, and some of the tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..captures import Key, Use, UseRecorder
from ..data import Data, eval_mode

TOKENS = 512
"""Rows of each input that searches compute with."""


@dataclass(eq=False)
class WeightInputs:
    """The inputs of one matrix: max |x_k| and the sum of |x_k| over all rows, (K,), and some of the rows."""

    largest: Tensor
    total: Tensor
    count: int = 0
    parts: list[Tensor] = field(default_factory=list)

    @property
    def mean(self) -> Tensor:
        """(K,), mean |x_k|."""
        return self.total / max(self.count, 1)

    @property
    def rows(self) -> Tensor:
        """(M, K) in fp32 (fp64 in a model in fp64)."""
        rows = torch.cat(self.parts)
        return rows if rows.dtype == torch.float64 else rows.float()


@torch.no_grad()
def collect_inputs(
    model: nn.Module, data: Data, batches: Collection[Any], weights: Collection[Tensor], tokens: int = TOKENS
) -> dict[Key, WeightInputs]:
    """The inputs of these parameters over all batches, without padded tokens; so many rows are kept of each input."""
    each = -(-tokens // max(len(batches), 1))
    found: dict[Key, WeightInputs] = {}
    # Weights with the same input share its rows; holding the input keeps its id from being reused.
    taken: dict[Key, tuple[Tensor, Tensor, Tensor, Tensor, int]] = {}
    mask: Tensor | None = None

    def seen(use: Use) -> None:
        key = id(use.input), use.expert
        if key not in taken:
            rows = torch.cat([part.detach() for part in use.unpadded(mask)])
            if not len(rows):
                return
            size = rows.abs()
            count = len(rows)
            places = torch.linspace(0, count - 1, min(each, count), device=rows.device, dtype=torch.float32)
            some = rows[places.round().long()]
            taken[key] = use.input, size.amax(0).float(), size.float().sum(0), some.clone(), count
        _, largest, total, some, count = taken[key]
        of = found.setdefault(use.key, WeightInputs(torch.zeros_like(largest), torch.zeros_like(total)))
        of.largest, of.total = torch.maximum(of.largest, largest), of.total + total
        of.count += count
        of.parts.append(some)

    with eval_mode(model):
        for batch in batches:
            mask = data.mask_of(batch)
            with UseRecorder(weights, seen):
                data.call(model, batch)
            taken.clear()
    return found
