"""collect: run a model on batches and pass the inputs of its weights to the requested statistics.

A layer that is shared or called in a loop gets the inputs of all calls (see `uses`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from .base import Statistic, Statistics
from .batches import Data, run_batches
from .uses import Use, UseRecorder


def collect(
    model: nn.Module,
    data: Data,
    wanted: Mapping[Tensor, Sequence[type[Statistic]]],
    transposed: Collection[int] = (),
) -> dict[Tensor, Statistics]:
    """Statistics of the inputs of weights, over all batches.

    Args:
        model: run in eval mode, without gradients; it is not changed.
        data: the batches, and how to call the model.
        wanted: the statistics to collect for each parameter of `model`.
        transposed: ids of the parameters that are stored as (K, N), with inputs of size K.

    Returns:
        For each parameter, its statistics by class.

    Raises:
        ValueError: there is no batch, or no `F.linear` and no convolution with one of the weights ran.
    """
    found: dict[Tensor, Statistics] = {p: {kind: kind() for kind in kinds} for p, kinds in wanted.items()}

    def seen(use: Use) -> None:
        if use.expert is not None or use.transposed:
            return
        for rows in use.rows():
            for statistic in found[use.weight].values():
                statistic.update(rows)

    def end_batch() -> None:
        for statistics in found.values():
            for statistic in statistics.values():
                statistic.end_batch()

    with UseRecorder(found, seen, transposed=transposed):
        run_batches(model, data, end_batch)
    unseen = {p for p, statistics in found.items() if any(not s.rows for s in statistics.values())}
    if unseen:
        names = [name for name, p in model.named_parameters() if p in unseen]
        raise ValueError(
            f"calibration: no input of {', '.join(names)} was seen; only those of F.linear and convolutions are. Use a "
            "recipe that needs no data for these weights"
        )
    return found
