"""Stochastic rounding that replicas of a model have in common, so that they stay equal."""

from __future__ import annotations

from torch import nn

from .codes import CodesWeight, SharedRounding


def share_rounding(model: nn.Module, seed: int, step: int = 0) -> None:
    """Round each update of the weights in codes by noise that depends on (seed, step, number of the weight) alone.

    Otherwise the noise comes from torch's default generator, whose state must then be the same on all ranks, and which
    a dropout or a data loader of one rank moves on. `DistributedDataParallel` calls it by itself, with a seed of rank
    0. Shards of FSDP2 have different noise all the same; call it after `fully_shard`.

    Args:
        model: the same on all ranks; weights that are not in codes are left as they are.
        seed: the same on all ranks.
        step: updates so far, to go on with a run exactly.
    """
    for number, parameter in enumerate(model.parameters()):
        weight = getattr(parameter, "_local_tensor", parameter)
        if isinstance(weight, CodesWeight):
            vars(weight)["_shared_rounding"] = SharedRounding(seed, number, step)
