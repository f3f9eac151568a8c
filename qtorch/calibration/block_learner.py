"""BlockLearner of AutoRound: from calibrated weights to what is learned, and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..blockwise import BlockRun
from ..recipe import Calibrated
from .rounded_matrix import RoundedMatrix, combined_report
from .rounding import AutoRound, Grid, Learnable


@dataclass(frozen=True, eq=False)
class LearnableWeight:
    """A calibrated weight that can be learned further.

    Attributes:
        rounded: its matrices.
        as_parameter: matrices (N, K) -> the parameter that they stand for.
        quantized: grids of the matrices -> the quantized weight.
    """

    rounded: Sequence[RoundedMatrix]
    as_parameter: Callable[[Sequence[Tensor]], Tensor]
    quantized: Callable[[Sequence[Grid]], Tensor]


@dataclass(frozen=True)
class AutoRoundLearner:
    """AutoRound on all weights of a block that were calibrated with it."""

    algorithm: AutoRound

    def learn_block(self, run: BlockRun, made: Mapping[Tensor, Calibrated]) -> Mapping[Tensor, Calibrated]:
        """The weights with what was learned; none if the error of the block has not become less."""
        begun = time.perf_counter()
        starts = {weight: of.learnable for weight, of in made.items() if isinstance(of.learnable, LearnableWeight)}
        learnables = {}
        for weight, start in starts.items():
            grids, values = zip(*((part.grid, part.best_values()) for part in start.rounded), strict=True)
            learnables[weight] = Learnable(grids, values, start.as_parameter)
        found = self.algorithm.learn(learnables, run.loss, run.count)
        seconds = (time.perf_counter() - begun) / max(1, len(found))
        better = {}
        for weight, learned in found.items():
            start = starts[weight]
            parts = [part.with_grid(grid, "autoround") for part, grid in zip(start.rounded, learned, strict=True)]
            report = combined_report([part.report for part in parts])
            report = replace(report, seconds=report.seconds + seconds)
            better[weight] = Calibrated(start.quantized(learned), report)
        return better
