"""calibrate: give the inputs of layers in training their first scales from data, before training or in place of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...statistics import Data, run_batches
from .layers.linear import FakeQuantizedLayer


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Any]) -> int:
    """Run `model` in eval mode on each batch, with the inputs of its layers in floating point, and start the scales of
    these inputs: observed ones where their observer says, learned ones from the mean of the ranges that their scale
    rule finds in the batches.

    Scales that training has moved start anew. In several processes all see their own batches and start alike. Before
    `fully_shard`: the parameters of a sharded model are not there to be set.

    Args:
        batches: a mapping is given as keyword arguments, a tuple or list as arguments, all else as the only one.

    Returns:
        The number of quantizers that have been started.

    Raises:
        ValueError: the model has no input with a static scale, or there is no batch.
    """
    layers = [module for module in model.modules() if isinstance(module, FakeQuantizedLayer)]
    inputs = dict.fromkeys(layer.input_quantizer for layer in layers)
    quantizers = [quantizer for quantizer in inputs if quantizer is not None and quantizer.is_static]
    if not quantizers:
        raise ValueError("calibrate: no layer of the model is prepared with static scales of its input")
    for quantizer in quantizers:
        quantizer.observed = quantizer.new_statistic()

    def end_batch() -> None:
        for quantizer in quantizers:
            if quantizer.observed is not None:
                quantizer.observed.end_batch()

    try:
        run_batches(model, Data(batches), end_batch)
    except BaseException:
        for quantizer in quantizers:
            quantizer.observed = None
        raise
    return sum(quantizer.end_observation() for quantizer in quantizers)
